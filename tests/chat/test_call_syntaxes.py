"""Each syntax of calls, as the models' own templates write it and as models get it wrong."""

import importlib.util
import logging
import re
from pathlib import Path

import pytest

from agentrl.chat.calls.values import MAX_DEPTH
from agentrl.chat.derivation import derive_format, find_format
from agentrl.chat.formats import CallSyntax, JsonCalls, Reasoning, TurnFormat
from agentrl.chat.parsing import parse_turn
from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer
from tests.chat import written_calls
from tests.chat.written_calls import WRITERS, tool_schemas

TOKENIZER = qwen_like_tokenizer()
REFERENCES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
QUESTION = {"role": "user", "content": "q"}
HARMONY_PROMPT = "<|start|>assistant"

CALLS = [
    ("search", {"query": 'Zürich "東京" 🙂', "limit": 7}),
    ("plot", {"points": [1, 2.5, {"x": "y", "ok": [True, False]}], "title": "  a\n\n b\n", "grid": True}),
]


def read(text, syntax, calls=CALLS, prompt="", stopped=True):
    return parse_turn(text, TurnFormat(syntax), prompt=prompt, tools=tool_schemas(calls), stopped=stopped)


def plain(turn):
    return [(call.name, call.arguments, call.error) for call in turn.calls]


def expected(calls):
    return [(name, arguments, None) for name, arguments in calls]


def prompt_of(syntax):
    return HARMONY_PROMPT if syntax in (CallSyntax.HARMONY, CallSyntax.BEAM) else ""


every_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


@every_writer
def test_calls_are_read_as_they_were_written_d01_d03_d15(write):
    turn = read(write(CALLS), WRITERS[write], prompt=prompt_of(WRITERS[write]))
    assert plain(turn) == expected(CALLS)
    assert turn.message["content"] == ""
    no_arguments = read(write([("now", {})]), WRITERS[write], prompt=prompt_of(WRITERS[write]))
    assert plain(no_arguments) == [("now", {}, None)]


@pytest.mark.parametrize(
    ("name", "end", "write"),
    [
        ("qwen2_5", "<|im_end|>", written_calls.hermes),
        ("qwen3", "<|im_end|>", written_calls.hermes),
        ("qwen3_vl", "<|im_end|>", written_calls.hermes),
        ("qwen3_5_think", "<|im_end|>", written_calls.xml),
        ("qwen3_5_nothink", "<|im_end|>", written_calls.xml),
        ("qwen3_6", "<|im_end|>", written_calls.xml),
        ("nemotron_3_nano", "<|im_end|>", written_calls.xml),
        ("nemotron_3_super", "<|im_end|>", written_calls.xml),
        ("nemotron_3_ultra", "<|im_end|>", written_calls.xml),
        ("glm4moe", "", written_calls.glm),
        ("deepseekv3", "<｜end▁of▁sentence｜>", written_calls.deepseek),
        ("llama3_1", "<|eot_id|>", written_calls.llama),
        ("llama3_2", "<|eot_id|>", written_calls.llama),
        ("lfm2_v2", "<|im_end|>", written_calls.lfm2),
        ("lfm2_2_5", "<|im_end|>", written_calls.lfm2),
        ("gemma4", "<|tool_response>", written_calls.gemma),
        ("gemma4_v5", "<|tool_response>", written_calls.gemma),
        ("gptoss", "", written_calls.harmony_role),
    ],
)
def test_the_models_own_templates_write_calls_that_are_read_back(name, end, write):
    """What the test's writers write is what the published template renders, and its rendering is read back."""
    one_only = name in ("llama3_1", "llama3_2", "gptoss")
    calls = (
        [("search", {"query": "a 'b'", "limit": 7})] if one_only else [("first", {"text": "x", "n": 1}), ("now", {})]
    )
    if name.startswith("lfm2"):
        calls[0][1]["text"] = "plain"
    template = Template(TOKENIZER, (REFERENCES / f"{name}.jinja").read_text(encoding="utf-8"), {})
    tools = tool_schemas(calls)
    made = [tool_call(index, *call) for index, call in enumerate(calls)]
    asked = template.render([QUESTION], tools, False)
    called = template.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": made}], tools, False)
    turn = called.removeprefix(asked)
    turn = turn.partition(end)[0] if end else turn
    squeezed = ["".join(text.split()).replace('"', "'") for text in (write(calls), turn)]
    if write is not written_calls.gemma:  # it sorts the arguments
        assert squeezed[0] in squeezed[1]
    prompt = HARMONY_PROMPT if name == "gptoss" else ""
    text = turn.partition(HARMONY_PROMPT)[2] if name == "gptoss" else turn
    assert plain(read(text, WRITERS[write], calls, prompt)) == expected(calls)


@every_writer
def test_text_around_calls_is_content_and_reasoning_holds_no_calls_d13_d16(write):
    syntax = WRITERS[write]
    if syntax in (CallSyntax.HARMONY, CallSyntax.BEAM):
        final = "<|start|>assistant<|channel|>{}<|message|>{}<|end|>"
        text = "<|channel|>analysis<|message|>maybe " + write([("rm", {})]).replace("<|call|>", "") + "<|end|>"
        text += final.format("commentary", "Let me check.") + "<|start|>assistant"
        text += write(CALLS).removesuffix("<|call|>") + "<|call|>"
        text += final.format("final", "ok?")
        turn = read(text, syntax, prompt=HARMONY_PROMPT)
        assert re.search(r"to=(functions\.)?rm", turn.message["reasoning_content"])
    else:
        thought = f"<think>maybe {write([('rm', {})])}</think>"
        turn = read(f"{thought}\n\nLet me check.\n{write(CALLS)}\nok?", syntax)
        assert turn.message["reasoning_content"].startswith("maybe ")
    assert turn.message["content"] == "Let me check.\nok?"
    assert plain(turn) == expected(CALLS)


@every_writer
def test_a_call_that_is_cut_off_is_reported_and_never_run_d14(write):
    """Every prefix gives whole calls, then at most one with an error, and no call that was not written."""
    syntax, whole = WRITERS[write], write(CALLS)
    reported = 0
    for size in range(len(whole)):
        turn = read(whole[:size], syntax, prompt=prompt_of(syntax), stopped=False)
        good = [call for call in plain(turn) if call[2] is None]
        assert good == expected(CALLS)[: len(good)]
        assert len(turn.calls) - len(good) <= 1
        reported += len(turn.calls) > len(good)
    assert reported > len(whole) / 3


@every_writer
def test_one_bad_call_does_not_become_another_d07(write):
    """What stands in the text of a broken call is not run as a call of its own."""
    syntax = WRITERS[write]
    inner = write([("rm", {})])
    broken = write([("say", {"text": "x"})])
    text = broken.replace("x", inner, 1)
    for call in read(text, syntax, [("say", {"text": "x"})], prompt_of(syntax)).calls:
        assert call.error is not None or call.name == "say"


@every_writer
def test_deep_nesting_is_an_unreadable_call_d10(write):
    syntax = WRITERS[write]
    deep = []
    for _ in range(MAX_DEPTH + 20):
        deep = [deep]
    calls = [("f", {"x": deep})]
    turn = read(write(calls), syntax, calls, prompt_of(syntax))
    assert [bool(call.error) for call in turn.calls] == [True]
    hopeless = write([("f", {"x": []})]).replace("[]", "[" * 50_000, 1)
    assert all(call.error for call in read(hopeless, syntax, calls, prompt_of(syntax)).calls)


@every_writer
def test_a_row_of_calls_and_a_cut_one_d10(write):
    syntax = WRITERS[write]
    text = write([("f", {"a": 1})] * 23)
    cut = text[: text.rindex("1") + 1]
    turn = read(cut, syntax, [("f", {"a": 1})], prompt_of(syntax))
    listed = {"pythonic", "lfm2", "python_tags", "mistral", "cohere", "phi"}  # all calls are one text
    assert [bool(call.error) for call in turn.calls] == ([True] if write.__name__ in listed else [False] * 22 + [True])


@pytest.mark.parametrize("write", [written_calls.hermes, written_calls.mistral, written_calls.phi, written_calls.llama])
def test_arguments_that_are_a_string_are_decoded_again_d08(write):
    for arguments, read_as in [('{"x": 1}', {"x": 1}), ("[1]", None), ("3", None), ("abc", None)]:
        (call,) = read(write([("f", arguments)]), WRITERS[write]).calls
        assert (call.arguments, bool(call.error)) == (read_as or {}, read_as is None)


def test_delimiters_inside_of_strings_close_nothing():
    for syntax, marks in {
        CallSyntax.HERMES: ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        CallSyntax.XML: ("</tool_call>", "</function>", "<tool_call><function=g>", "</think>"),
        CallSyntax.GLM: ("</tool_call>", "<arg_key>", "</think>"),
        CallSyntax.DEEPSEEK: ("<｜tool▁call▁end｜>", "```", "<｜tool▁sep｜>"),
        CallSyntax.MISTRAL: ("[TOOL_CALLS]", "[ARGS]"),
        CallSyntax.HARMONY: ("<|end|>", "<|call|>", "<|message|>"),
        CallSyntax.BEAM: ("<|end|>", "<|call|>", "<|message|>", '<rfl:parameter name="x">'),
        CallSyntax.LFM2: ("<|tool_call_end|>", "[f(", "'", '"'),
        CallSyntax.COHERE: ("<|END_ACTION|>",),
        CallSyntax.GEMMA: ("<tool_call|>", "}", '"', "\\"),
    }.items():
        write = next(write for write, read_by in WRITERS.items() if read_by is syntax)
        for mark in marks:
            calls = [("f", {"x": f"a{mark}b"}), ("g", {"y": 1})]
            assert plain(read(write(calls), syntax, calls, prompt_of(syntax))) == expected(calls), (syntax, mark)


def test_white_space_of_arguments_is_exact_d04():
    text = "<tool_call><function=edit><parameter=old>\n    if x:\n        y\n\n</parameter></function></tool_call>"
    (call,) = read(text, CallSyntax.XML, [("edit", {"old": ""})]).calls
    assert call.arguments == {"old": "    if x:\n        y\n"}


@pytest.mark.parametrize("write", [written_calls.xml, written_calls.glm, written_calls.beam])
def test_bare_text_gets_its_type_from_the_schema_d05(write):
    schemas = {
        "n": {"type": "integer"},
        "f": {"type": "boolean"},
        "s": {"type": "string"},
        "t": {"type": "string"},
        "o": {"type": "array"},
        "q": {"type": ["integer", "null"]},
        "u": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "e": {"enum": [1, 2]},
        "any": {},
    }
    written = {
        "n": "7", "f": "True", "s": "null", "t": "123", "o": '[{"a":true,"b":null}]', "q": "None", "u": "2.50",
        "e": "2", "any": '{"k": [1]}',
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": schemas}}}]
    (call,) = parse_turn(write([("f", written)]), TurnFormat(WRITERS[write]), prompt="", tools=tools).calls
    assert call.arguments == {
        "n": 7, "f": True, "s": "null", "t": "123", "o": [{"a": True, "b": None}], "q": None, "u": 2.5, "e": 2,
        "any": {"k": [1]},
    }  # fmt: skip
    for wrong in ("seven", "7.5", "9" * 5000, "[1", ""):
        (call,) = parse_turn(write([("f", {"n": wrong})]), TurnFormat(WRITERS[write]), prompt="", tools=tools).calls
        assert call.arguments == {"n": wrong}  # for the tool's check to refuse by name


def test_an_answer_in_json_or_brackets_is_no_call():
    for text in ('{"result": 5}', '{"name": "Ann", "age": 3}', '[{"name": "Ann"}]'):
        assert read(text, CallSyntax.LLAMA).calls == []
    for text in ("[1, 2]", "see [this](https://x.y)", "a[f(x)]", "I call [f(a=1)] now"):
        assert read(text, CallSyntax.PYTHONIC).calls == []


def test_python_is_never_evaluated():
    for value in ("__import__('os')", "1 + 1", "open('x')", "x", "f'{1}'", "(1, 2)", "-" * 5000 + "1", "{1}"):
        for text in (f"[f(a={value})]", f"[f(**{value})]", f"[f({value})]"):
            for syntax, wrapped in (
                (CallSyntax.LFM2, f"<|tool_call_start|>{text}<|tool_call_end|>"),
                (CallSyntax.PYTHONIC, text),
            ):
                assert all(call.error for call in read(wrapped, syntax).calls)


def test_an_empty_list_holds_no_calls():
    """What SmolLM2's prompt asks for where nothing is to be called."""
    turn = read("<tool_call>[]</tool_call>", CallSyntax.HERMES)
    assert (turn.calls, turn.message) == ([], {"role": "assistant", "content": ""})


def test_a_turn_of_beam():
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant to=edit<|channel|>analysis <|constrain|>xml"
        '<|message|><rfl:parameter name="n">\n7\n</rfl:parameter><rfl:parameter name="text">\n  a\n\n\n</rfl:parameter>'
        "<|end|><|start|>assistant to=now<|channel|>analysis <|constrain|>xml<|message|>"
    )
    calls = [("edit", {"n": 7, "text": "  a\n\n"}), ("now", {})]
    turn = read(text, CallSyntax.BEAM, calls, HARMONY_PROMPT)
    assert (plain(turn), turn.message["reasoning_content"]) == (expected(calls), "why")
    cut = read(text, CallSyntax.BEAM, calls, HARMONY_PROMPT, stopped=False)
    assert [bool(call.error) for call in cut.calls] == [False, True]


def test_framing_is_no_content():
    turn = read("<|START_RESPONSE|>Hello.<|END_RESPONSE|>", CallSyntax.COHERE)
    assert turn.message["content"] == "Hello."
    thinking = TurnFormat(CallSyntax.COHERE, Reasoning("<|START_THINKING|>", "<|END_THINKING|>", "thinking"))
    text = "<|START_THINKING|>why<|END_THINKING|>" + written_calls.cohere(CALLS)
    turn = parse_turn(text, thinking, prompt="")
    assert (turn.message["content"], turn.message["thinking"]) == ("", "why")
    assert plain(turn) == expected(CALLS)


def test_harmony_recipients_and_channels():
    text = "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    turn = read(text, CallSyntax.HARMONY, prompt=HARMONY_PROMPT)
    assert (turn.message["content"], turn.message["reasoning_content"], turn.calls) == ("42", "think", [])
    assert read("42", CallSyntax.HARMONY, prompt=HARMONY_PROMPT).message["content"] == "42"
    prefilled = read("why<|end|>", CallSyntax.HARMONY, prompt=HARMONY_PROMPT + "<|channel|>analysis<|message|>")
    assert prefilled.message["reasoning_content"] == "why"
    cut = read("<|channel|>commentary to=functions.f", CallSyntax.HARMONY, prompt=HARMONY_PROMPT)
    assert [(call.name, bool(call.error)) for call in cut.calls] == [("f", True)]


# --- formats of unknown templates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "end", "syntax"),
    [
        ("qwen2_5", "<|im_end|>", CallSyntax.HERMES),
        ("qwen3_5_think", "<|im_end|>", CallSyntax.XML),
        ("nemotron_3_nano", "<|im_end|>", CallSyntax.XML),
        ("glm4moe", None, CallSyntax.GLM),
        ("deepseekv3", "<｜end▁of▁sentence｜>", CallSyntax.DEEPSEEK),
        ("llama3_2", "<|eot_id|>", CallSyntax.LLAMA),
        ("lfm2_v2", "<|im_end|>", CallSyntax.LFM2),
        ("gemma4_v5", "<turn|>", CallSyntax.GEMMA),
        ("gptoss", "<|call|>", CallSyntax.HARMONY),
    ],
)
def test_the_format_of_a_template_is_found_by_rendering(name, end, syntax):
    template = Template(TOKENIZER, (REFERENCES / f"{name}.jinja").read_text(encoding="utf-8"), {})
    assert derive_format(template.render, end).calls is syntax


@pytest.mark.parametrize("name", ["llama3", "gemma3", "phi3", "cohere2"])
def test_no_format_is_made_up_for_a_template_without_calls(name):
    template = Template(TOKENIZER, (REFERENCES / f"{name}.jinja").read_text(encoding="utf-8"), {})
    assert derive_format(template.render, None) is None


def test_the_tags_of_reasoning_are_found_by_rendering():
    source = TOKENIZER.chat_template.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    form = derive_format(Template(TOKENIZER, source, {}).render, "<|im_end|>")
    assert (form.reasoning.opening, form.reasoning.closing) == ("[THINK]", "[/THINK]")


def test_a_derived_format_is_announced_once(caplog):
    tokenizer = fix_tokenizer()
    tokenizer.response_template = None
    with caplog.at_level(logging.WARNING):
        renderer = Renderer(tokenizer, tools=True)
        renderer.parse(tokenizer.encode("hi"), None)
    assert [record.message for record in caplog.records if "no known family" in record.message] == [
        "the chat template is of no known family; its calls are read as JSON objects between '<call>' and '</call>'"
    ]


def test_the_old_response_schema_is_refused_by_name():
    tokenizer = fix_tokenizer()
    tokenizer.response_schema = {"type": "object"}
    with pytest.raises(TemplateError, match=r"response_schema.*response_template"):
        find_format(Template(tokenizer, tokenizer.chat_template, {}), "<e>", None)


def test_markers_of_a_derived_format_are_literal():
    form = TurnFormat(JsonCalls("(((", ")))", "tool", "args"))
    turn = parse_turn("a(((" + '{"tool": "f", "args": {"x": ")))"}}' + ")))b", form, prompt="")
    assert plain(turn) == [("f", {"x": ")))"}, None)]
    assert turn.message["content"] == "a\nb"
