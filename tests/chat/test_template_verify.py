"""The report on a template, as a command line shows it."""

import pytest

from agentrl.chat.repair import Origin
from agentrl.chat.verify import verify_template
from agentrl.errors import ConfigurationError
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer
from tests.chat.members import TOOL_USERS


def test_an_exact_template(tmp_path):
    qwen_like_tokenizer().save_pretrained(tmp_path)
    report = verify_template(str(tmp_path))
    assert (report.family, report.origin, report.end_of_turn) == ("Qwen3", Origin.OWN, "<|im_end|>")
    assert report.usable
    assert report.reads_calls
    assert not report.forks
    assert report.own_problem is None
    assert "own template: exact" in str(report)


def test_a_template_that_gets_tools_in_a_form_that_its_model_was_not_trained_on(caplog):
    [member] = [member for member in TOOL_USERS if member.name == "Phi-4"]
    report = verify_template(member.tokenizer())
    assert (report.family, report.origin, report.tools_are_ours) == ("Phi-4", Origin.FAMILY, True)
    assert "RL has to teach" in str(report)
    assert "shows no tools; the training template of Phi-4 adds them in a form of ours" in caplog.text


def test_a_template_that_forgets():
    report = verify_template(fix_tokenizer("think"))
    assert (report.family, report.origin, report.forks) == (None, Origin.REPAIRED, True)
    assert "message 1 (assistant) changes" in report.own_problem
    assert "before: " in str(report)


def test_a_template_that_is_refused():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("+ calls(message)", "")
    report = verify_template(tokenizer)
    assert not report.usable
    assert not report.forks
    assert "does not show names of called tools" in report.refusal
    assert report.refusal in str(report)


def test_a_template_that_cannot_even_be_rendered():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    report = verify_template(tokenizer)
    assert not report.usable
    assert "never" in report.refusal


def test_what_is_no_model_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="No tokenizer could be loaded"):
        verify_template(str(tmp_path))
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="no chat template"):
        verify_template(tokenizer)
