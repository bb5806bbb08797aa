"""Families by structure, and training templates that write the same tokens as the models' own."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from agentrl.chat.families import FAMILIES, recognise, training_template
from agentrl.chat.prefix import check_prefix_preserving, first_break, tool_call, tool_schema
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin
from agentrl.chat.template import Template
from agentrl.testing.tokenizers import qwen_like_tokenizer

TOKENIZER = qwen_like_tokenizer()
REFERENCES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
TOOLS = [tool_schema("search"), tool_schema("add")]
QUIET = {"enable_thinking": False}


def reference(name, **variables):
    return Template(TOKENIZER, (REFERENCES / f"{name}.jinja").read_text(encoding="utf-8"), variables)


def trained(own):
    source = training_template(recognise(own.source), own.render)
    return Template(own.tokenizer, source, own.variables)


def result(index, text="5"):
    return {"role": "tool", "name": "add", "tool_call_id": f"call{index:05d}", "content": text}


def conversations():
    """Prompts as a sampler sees them: with and without history and reasoning, up to two tool rounds."""
    systems = [[], *([{"role": "system", "content": text}] for text in ("Be brief.\n", ""))]
    histories = [
        [],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello.", "reasoning_content": "wave"},
        ],
    ]
    for system, history, rounds in itertools.product(systems, histories, range(3)):
        for content, reasoning, calls in itertools.product(("", "Let me see."), (None, "why\nnot"), (1, 2)):
            thought = {} if reasoning is None else {"reasoning_content": reasoning}
            messages = [*system, *history, {"role": "user", "content": "ab\n\ncd Zürich"}]
            for _ in range(rounds):
                made = [tool_call(index, "add", {"a": [index, None], "b": "é"}) for index in range(calls)]
                messages.append({"role": "assistant", "content": content, **thought, "tool_calls": made})
                messages += [result(index) for index in range(calls)]
            yield messages
    inline = {"role": "assistant", "content": "<think>\nr\n</think>\n\nx"}
    spaced = {"role": "assistant", "content": "\n\nx\n", "reasoning_content": "\nwhy\n"}
    for turn in (inline, spaced):
        yield [{"role": "user", "content": "q"}, turn, result(0)]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("name", "variables"),
    [("qwen2_5", {}), ("qwen3", {}), ("qwen3", QUIET), ("qwen3", {"enable_thinking": True})],
)
def test_the_training_template_writes_the_same_wherever_the_own_one_keeps_its_turns(name, variables, tools):
    own = reference(name, **variables)
    ours = trained(own)
    compared = 0
    for messages in conversations():
        if first_break(own.render, messages, tools) is None:
            assert ours.render(messages, tools, True) == own.render(messages, tools, True)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_of_qwen3_with_history_are_those_of_the_own_template(tools):
    """Earlier answers without reasoning get no think block: nothing is injected in the middle."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "q"},
    ]
    own = reference("qwen3")
    assert trained(own).render(messages, tools, True) == own.render(messages, tools, True)


@pytest.mark.parametrize(
    ("name", "variables"), [("qwen2_5", {}), ("qwen3", {}), ("qwen3", QUIET), ("qwen3_instruct_2507", {})]
)
def test_training_templates_keep_every_turn_c02(name, variables):
    ours = trained(reference(name, **variables))
    check_prefix_preserving(ours.render)
    for messages in conversations():
        # The generation prompt of the quiet mode has already said that there is no reasoning.
        if not variables or not ("reasoning_content" in str(messages) or "<think>" in str(messages)):
            assert first_break(ours.render, [*messages, {"role": "user", "content": "more"}], TOOLS) is None


def test_the_reasoning_of_every_turn_of_a_row_stays_c02():
    turn = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [tool_call(0, "add", {})],
    }
    messages = [{"role": "user", "content": "q"}, turn, result(0), {"role": "user", "content": "and?"}]
    own = reference("qwen3")
    assert "why" not in own.render(messages, TOOLS, True)
    assert "<think>\nwhy\n</think>" in trained(own).render(messages, TOOLS, True)


def test_qwen3_is_replaced_by_its_training_template_and_qwen2_5_is_not():
    for name, replaced in (("qwen3", True), ("qwen2_5", False), ("qwen3_instruct_2507", False)):
        tokenizer = qwen_like_tokenizer()
        tokenizer.chat_template = source = reference(name).source
        renderer = Renderer(tokenizer, tools=True)
        assert (renderer._template.source != source) is replaced
        assert tokenizer.chat_template == source


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_a_fork_is_recognised_by_structure(name):
    source = reference(name).source
    family = recognise(source)
    assert family.training_template == f"{name}.jinja"
    forks = [
        source.replace("# Tools", "#  Tools"),
        source.replace("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "You are Bob."),
        source.replace("\n", " \n"),
        "{# my fork #}" + source,
    ]
    assert [recognise(fork) for fork in forks] == [family] * len(forks)


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_vl", "llama3_1", "glm4moe", "gptoss", "gemma3"])
def test_relatives_with_another_format_are_not_recognised(name):
    assert recognise(reference(name).source) is None


@pytest.mark.parametrize("default", ["You are Bob.", 'Say "hi"\n\\n, Zoë {{ x }}', ""])
def test_the_default_system_prompt_of_a_fork_is_kept(default):
    escaped = default.replace("\\", "\\\\").replace("\n", "\\n")
    own = reference("qwen2_5")
    fork = Template(
        TOKENIZER,
        own.source.replace("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", escaped),
        {},
    )
    for messages in ([{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]):
        assert trained(fork).render(messages, None, True) == fork.render(messages, None, True)
    assert "Alibaba" in trained(own).render([{"role": "user", "content": "q"}], TOOLS, True)


def test_a_member_that_begins_turns_otherwise_is_repaired():
    """The training template would sample from another header; the own one forgets, which rows need not."""
    tokenizer = qwen_like_tokenizer()
    tokenizer.chat_template = reference("qwen3").source.replace(
        "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable_thinking",
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("loop.index0 > ns.last_query_index", "loop.last")
    renderer = Renderer(tokenizer, tools=True)
    assert renderer.choice.origin is Origin.REPAIRED
    assert renderer.choice.template.generation_prompt.endswith("<think>\n")


def test_every_family_has_its_training_template():
    for family in FAMILIES:
        own = Template(TOKENIZER, "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", {})
        assert training_template(family, own.render)
