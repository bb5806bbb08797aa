"""Families by structure, and training templates that write the same tokens as the models' own."""

import itertools
import re

import pytest

from agentrl.chat.families import FAMILIES, recognise, training_template
from agentrl.chat.prefix import check_prefix_preserving, first_break, tool_call
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin, prove
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.chat.members import TOOL_USERS, Member

BY_NAME = {member.name: member for member in TOOL_USERS}
TRAINED = [
    member
    for member in TOOL_USERS
    # The first revision of Gemma 4 writes results as turns of their own; it is exact and never replaced.
    if recognise(member.source).training_template is not None and member.file != "gemma4_v2"
]
NESTED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "number"}, "description": "Numbers."},
        "b": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "c": {
            "type": "object",
            "properties": {
                "d": {"type": "boolean"},
                "e": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"f": {"type": "string"}}, "required": ["f"]},
                },
            },
            "required": ["d"],
        },
        "g": {"type": ["string", "null"]},
        "h": {"oneOf": [{"type": "string", "description": "s"}, {"type": "integer", "default": 3}]},
        "i": {"type": "string", "nullable": True, "default": "q"},
        "j": {"type": "array"},
        "k": {"type": "object", "additionalProperties": {"type": "string"}},
        "l": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "nullable": True},
    },
    "required": ["a", "c"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add. Zürich", "parameters": NESTED}},
    {
        "type": "function",
        "function": {"name": "now", "description": "Now.", "parameters": {"type": "object", "properties": {}}},
    },
]


def members(*names):
    return pytest.mark.parametrize("member", [BY_NAME[name] for name in names], ids=lambda member: member.name)


every_member = pytest.mark.parametrize("member", BY_NAME.values(), ids=BY_NAME)
every_trained = pytest.mark.parametrize("member", TRAINED, ids=lambda member: member.name)


def trained(own):
    return Template(own.tokenizer, training_template(recognise(own.source), own.render), own.variables)


def result(index, text="5\n"):
    return {"role": "tool", "name": "add", "tool_call_id": f"call{index:05d}", "content": text}


def conversations():
    """Prompts as a sampler sees them: with and without history and reasoning, up to two tool rounds."""
    greeting = {"role": "user", "content": "hi"}
    begins = [
        [],
        [{"role": "system", "content": "Be brief.\n"}],
        [{"role": "system", "content": ""}, greeting, {"role": "assistant", "content": "Hello."}],
        [greeting, {"role": "assistant", "content": "Hello.", "reasoning_content": "wave"}],
    ]
    arguments = {"a": [0, 1.5], "b": "é 'x' \\", "z": {"q": True, "p": "0"}}
    for begin in begins:
        question = [*begin, {"role": "user", "content": "ab\n\ncd Zürich"}]
        yield question
        for rounds, content, reasoning, calls in itertools.product((1, 2), ("", "See."), (None, "why\nnot"), (1, 2)):
            thought = {} if reasoning is None else {"reasoning_content": reasoning}
            messages = list(question)
            for numbers in (range(first, first + calls) for first in range(0, rounds * calls, calls)):
                made = [tool_call(index, "add", arguments) for index in numbers]
                messages += [{"role": "assistant", "content": content, **thought, "tool_calls": made}]
                messages += map(result, numbers)
            yield messages
    inline = {"role": "assistant", "content": "<think>\nr\n</think>\n\nx"}
    spaced = {"role": "assistant", "content": "\n\nx\n", "reasoning_content": "\nwhy\n"}
    for turn in (inline, spaced):
        yield [{"role": "user", "content": "q"}, turn, result(0)]


# Recognition --------------------------------------------------------------------------------------------------


@every_member
def test_every_member_is_recognised(member):
    assert recognise(member.source).name == member.family


@every_member
def test_a_fork_is_recognised_by_structure(member):
    source = member.source
    forks = [
        source.replace("# Tools", "#  Tools").replace("You are", "I  am"),
        source.replace("\n", " \n"),
        "{# my fork, unlike <function= or <|vision_start|> of others #}" + source,
        re.sub(r"(?<!\|)\bmessage\b(?!\|)", "m", source),
    ]
    assert [recognise(fork).name for fork in forks] == [member.family] * len(forks)


@every_trained
def test_turns_are_read_in_the_format_of_the_family_whatever_the_training_template_contains(member):
    renderer = Renderer(member.tokenizer(), tools=True, template_kwargs=member.variables, eos_ids=member.eos_ids)
    assert renderer.choice.origin is not Origin.REPAIRED
    assert renderer._format == recognise(member.source).format


def test_templates_of_no_family_are_not_recognised():
    assert recognise("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}") is None
    assert recognise(Member("Muse Glimmer", "muse_glimmer", "").source) is None


# Training templates -------------------------------------------------------------------------------------------


def shows_all(member, messages, tools):
    """Whether the own template of a member loses nothing of these messages that a training template must show."""
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    if member.family == "GPT-OSS":  # it shows the first call of a turn
        return all(len(made) == 1 for made in calls)
    if member.family.startswith("DeepSeek-V3"):  # it shows no tool definitions, and reasoning never
        return not tools and "reasoning" not in str(messages) and "<think>" not in str(messages)
    if member.family == "Cohere 2":  # it shows another field as reasoning, and no number of what nothing asked for
        return "reasoning" not in str(messages) and (calls or messages[-1]["role"] != "tool")
    if recognise(member.source).tools_are_ours or member.family in ("SmolLM2", "Phi-4-mini"):  # neither tools nor calls
        return not tools and not calls and messages[-1]["role"] != "tool"
    if member.family == "Gemma 4":  # it shows no result that nothing asked for
        return calls or messages[-1]["role"] != "tool"
    if member.family == "SmolLM3":  # it shows no tools, and reasoning never
        return not tools and not calls and "reasoning" not in str(messages)
    return not (member.file == "lfm2" and calls)  # its first revision shows no calls


SUPERFLUOUS = {
    "Cohere 2": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "Phi-3": "<|endoftext|>",
    "Phi-4-mini": "<|endoftext|>",
}
"""What own templates write at the end where no turn is to be opened, and take back when the conversation goes on."""


def without_superfluous(member):
    own, written = member.template, SUPERFLUOUS.get(member.family, "")
    return lambda messages, tools, open_turn: own.render(messages, tools, open_turn).removesuffix(
        "" if open_turn else written
    )


@every_trained
def test_the_training_template_writes_the_same_wherever_the_own_one_keeps_its_turns(member):
    own = member.template
    ours = trained(own)
    compared = 0
    for messages, tools in zip(conversations(), itertools.cycle((TOOLS, TOOLS, None)), strict=False):
        try:
            kept = first_break(without_superfluous(member), messages, tools) is None
        except TemplateError:  # a turn with several calls, or with text and reasoning in front of a call
            continue
        if kept and shows_all(member, messages, tools):
            assert ours.render(messages, tools, True) == own.render(messages, tools, True)
            compared += 1
    assert compared


@members("DeepSeek-R1", "DeepSeek-R1-Distill")
def test_one_round_of_calls_of_deepseek_is_the_own_one(member):
    """All rounds after the first lack markers in the own template; here each is written as the first is."""
    own = member.template
    question = {"role": "user", "content": "q"}
    call = tool_call(0, "add", '{"a": 1}')
    messages = [question, {"role": "assistant", "content": None, "tool_calls": [call, call]}, result(0)]
    if member.file == "deepseekv3":
        assert trained(own).render(messages, None, True) == own.render(messages, None, True)
    again = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, result(1)]
    text = trained(own).render(again, None, True)
    assert text.count("<｜tool▁calls▁begin｜>") == text.count("<｜tool▁calls▁end｜>") == 2
    assert text.count("<｜tool▁outputs▁begin｜>") == text.count("<｜tool▁outputs▁end｜>") == 2


@every_trained
def test_training_templates_are_proved_c02(member):
    ours = trained(member.template)
    assert prove(ours).problem is None
    check_prefix_preserving(ours.render)


@every_trained
def test_a_training_template_begins_turns_as_the_own_one(member):
    own, question = member.template, [{"role": "user", "content": "q"}]
    assert trained(own).render(question, None, True) == own.render(question, None, True)


@members("Qwen3", "GPT-OSS", "DeepSeek-R1", "Gemma 4, thinking")
def test_the_reasoning_of_every_turn_of_a_row_stays_c02(member):
    turn = {"role": "assistant", "content": "", "reasoning_content": "whyever", "tool_calls": [tool_call(0, "add", {})]}
    messages = [{"role": "user", "content": "q"}, turn, result(0), {"role": "user", "content": "and?"}]
    messages += [{"role": "assistant", "content": "7"}]
    own = member.template
    assert "whyever" not in own.render(messages, TOOLS, False)
    assert "whyever" in trained(own).render(messages, TOOLS, False)


@members("Qwen3")
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_of_qwen3_with_history_are_those_of_the_own_template(member, tools):
    """Earlier answers without reasoning get no think block: nothing is injected in the middle."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "q"},
    ]
    own = member.template
    assert trained(own).render(messages, tools, True) == own.render(messages, tools, True)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("Qwen3", Origin.FAMILY),
        ("Qwen3-Thinking-2507", Origin.OWN),
        ("Qwen2.5", Origin.OWN),
        ("Qwen3-Instruct-2507", Origin.OWN),
        ("Llama 3.2", Origin.FAMILY),
        ("GPT-OSS", Origin.FAMILY),
        ("DeepSeek-R1", Origin.FAMILY),
        ("Gemma 4", Origin.FAMILY),
        ("LFM2", Origin.OWN),
        ("Nemotron 3 Nano", Origin.OWN),
    ],
)
def test_the_own_template_is_replaced_only_where_it_is_not_exact(name, origin):
    member = BY_NAME[name]
    tokenizer = member.tokenizer()
    source = tokenizer.chat_template
    renderer = Renderer(tokenizer, tools=True, template_kwargs=member.variables, eos_ids=member.eos_ids)
    assert renderer.choice.origin is origin
    assert tokenizer.chat_template == source


@pytest.mark.parametrize("file", ["cohere", "llama3"])
def test_models_without_tools_are_refused_with_the_reason_c03(file):
    with pytest.raises(TemplateError, match=r"does not show|cannot render"):
        Renderer(Member(file, file, "").tokenizer(), tools=True)


# What a training template takes from the member ---------------------------------------------------------------


@pytest.mark.parametrize("default", ["You are Bob.", 'Say "hi"\n\\n, Zoë {{ x }} 🙂', ""])
def test_the_default_system_prompt_of_a_fork_is_kept(default):
    escaped = default.replace("\\", "\\\\").replace("\n", "\\n")
    own = BY_NAME["Qwen2.5"].template
    fork = Template(
        own.tokenizer,
        own.source.replace("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", escaped),
        {},
    )
    for messages in ([{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]):
        assert trained(fork).render(messages, None, True) == fork.render(messages, None, True)
    assert "Alibaba" in trained(own).render([{"role": "user", "content": "q"}], TOOLS, True)


@pytest.mark.parametrize("variables", [{}, {"date_string": "1 May 2031"}, {"tools_in_user_message": False}])
@members("Llama 3.1", "Llama 3.2")
def test_variables_of_llama_reach_every_render(member, variables):
    own = Template(member.tokenizer(), member.source, variables)
    question = {"role": "user", "content": "q"}
    for messages in ([question], [{"role": "system", "content": "s"}, question]):
        assert trained(own).render(messages, TOOLS, True) == own.render(messages, TOOLS, True)
    if "date_string" in variables:
        assert "1 May 2031" in trained(own).render([{"role": "user", "content": "q"}], None, True)


@pytest.mark.parametrize("effort", ["low", "high"])
def test_the_reasoning_effort_of_gpt_oss_reaches_every_render(effort):
    member = BY_NAME["GPT-OSS"]
    own = Template(member.tokenizer(), member.source, {"reasoning_effort": effort, "model_identity": "You are Bob."})
    messages = [{"role": "user", "content": "q"}]
    assert trained(own).render(messages, TOOLS, True) == own.render(messages, TOOLS, True)
    assert f"Reasoning: {effort}" in trained(own).render(messages, TOOLS, True)


@members("Llama 3.1", "GPT-OSS")
def test_built_in_tools_are_refused_not_ignored(member):
    ours = Template(member.tokenizer(), trained(member.template).source, {"builtin_tools": ["python"]})
    with pytest.raises(TemplateError, match="builtin_tools"):
        ours.render([{"role": "user", "content": "q"}], None, True)


def test_a_member_without_a_fact_that_its_family_has_is_refused():
    own = BY_NAME["Llama 3.1"].template
    fork = Template(own.tokenizer, own.source.replace("Today Date: ", "Day: "), {})
    with pytest.raises(TemplateError, match="date_string"):
        trained(fork)


def test_every_training_template_is_some_familys():
    own = Template(qwen_like_tokenizer(), "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", {})
    for family in FAMILIES:
        if family.training_template is None:
            with pytest.raises(TemplateError, match="no training template"):
                training_template(family, own.render)
        elif not family.facts:
            assert training_template(family, own.render)
