"""Does a template show tool rounds, and does it keep what it rendered."""

import pytest

from agentrl.chat.prefix import (
    check_prefix_preserving,
    first_break,
    missing_tool_parts,
    supports_tools,
    tool_conversations,
)
from agentrl.chat.renderer import Renderer
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import fix_tokenizer

EVERYTHING = (
    "{%- if tools -%}<b>tools{{ tools | tojson }}<e>{%- endif -%}{%- for m in messages -%}<b>{{ m.role }}|"
    "{%- if m.role != 'tool' -%}{{ m.content }}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}"
    "<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>{%- endfor -%}"
    "{%- if m.role == 'tool' -%}{{ m.content }}{%- endif -%}<e>{%- endfor -%}"
    "{{ '<b>assistant|' if add_generation_prompt else '' }}"
)


def render_with(source):
    return Template(fix_tokenizer(), source, {}).render


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        ("", []),
        (
            "<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>",
            ["names of called tools", "arguments of tool calls"],
        ),
        ("{%- if m.role == 'tool' -%}{{ m.content }}{%- endif -%}", ["tool results"]),
        ("({{ call.function.arguments | tojson }})", ["arguments of tool calls"]),
        ("{%- if tools -%}<b>tools{{ tools | tojson }}<e>{%- endif -%}", ["tool definitions"]),
    ],
)
def test_a_template_must_show_all_of_a_tool_round_c03(dropped, missing):
    render = render_with(EVERYTHING.replace(dropped, ""))
    assert missing_tool_parts(render) == missing
    assert supports_tools(render) is (not missing)


def test_the_error_names_what_a_template_does_not_show_c03():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = EVERYTHING.replace("({{ call.function.arguments | tojson }})", "")
    with pytest.raises(TemplateError, match="does not show arguments of tool calls"):
        Renderer(tokenizer, tools=True)


def test_a_template_that_forgets_reasoning_is_not_prefix_preserving_c02():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>r</think>call"},
        {"role": "tool", "content": "5"},
    ]
    tokenizer = fix_tokenizer("think")
    found = first_break(Template(tokenizer, tokenizer.chat_template, {}).render, messages, None)
    assert (found.index, found.role) == (1, "assistant")
    keeping = fix_tokenizer("grouped")
    render = Template(keeping, keeping.chat_template, {}).render
    assert first_break(render, messages, None) is None
    assert render(messages, None, True).startswith(render(messages[:2], None, False))
    assert "r</think>" in render(messages, None, True)


def test_the_break_names_the_message_and_shows_both_renderings_b09():
    tokenizer = fix_tokenizer("think")
    with pytest.raises(TemplateError, match=r"message 1 \(assistant\)") as caught:
        check_prefix_preserving(Template(tokenizer, tokenizer.chat_template, {}).render)
    assert "before: …'" in str(caught.value)
    assert "<think>because</think>Let me see.<call>" in str(caught.value)


def test_only_the_conversation_that_breaks_is_reported_b09():
    source = EVERYTHING.replace("{{ m.content }}", "{{ m.content if loop.last or m.content != 'odd' else '' }}", 1)
    render = render_with(source)

    def conversation(text):
        return [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "more"},
        ]

    found = [first_break(render, conversation(text), None) for text in ("a", "odd", "b")]
    assert [item and item.index for item in found] == [None, 1, None]


def test_the_fixtures_that_keep_their_turns_pass():
    for name in ("t0", "grouped"):
        tokenizer = fix_tokenizer(name)
        check_prefix_preserving(Template(tokenizer, tokenizer.chat_template, {}).render)


def test_the_generated_conversations_have_every_shape():
    tokenizer = fix_tokenizer()
    made = list(tool_conversations(Template(tokenizer, tokenizer.chat_template, {}).render))
    rounds = [sum(bool(m.get("tool_calls")) for m in messages) for messages in made]
    turns = [m for messages in made for m in messages if m["role"] == "assistant"]
    results = [m["content"] for messages in made for m in messages if m["role"] == "tool"]
    assert set(rounds) == {0, 1, 2, 3}
    assert {len(turn.get("tool_calls", [])) for turn in turns} == {0, 1, 2, 3}
    assert {messages[0]["role"] for messages in made} == {"system", "user"}
    assert any("reasoning_content" in turn for turn in turns)
    assert any("<think>" in turn["content"] for turn in turns)
    assert "" in results
    assert any(text != text.strip() for text in results)
    assert not all(map(str.isascii, results))
    assert max(len(turn["content"]) for turn in turns) > 500


def test_conversations_of_models_that_see_have_images_in_questions_and_in_results():
    tokenizer = fix_tokenizer()
    render = Template(tokenizer, tokenizer.chat_template, {}).render
    *text, seen = tool_conversations(render, images=True)
    assert text == list(tool_conversations(render))
    with_image = [m["role"] for m in seen if isinstance(m["content"], list) and {"type": "image"} in m["content"]]
    assert with_image == ["user", "tool", "tool", "tool"]


def test_a_turn_that_a_generation_prompt_has_begun_thinking_in_is_probed_with_reasoning_only():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- '<b>assistant\\n'", "{{- '<b>assistant\\n<think>'")
    made = list(tool_conversations(Template(tokenizer, tokenizer.chat_template, {}).render))
    turns = [m for messages in made for m in messages if m["role"] == "assistant"]
    assert all("reasoning_content" in turn or "<think>" in turn["content"] for turn in turns)


def test_an_error_of_the_template_itself_is_explained():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system please') }}"
    with pytest.raises(TemplateError, match="no system please"):
        Renderer(tokenizer, tools=True)


def test_a_tokenizer_without_template_is_refused_for_tools_and_for_messages():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template"):
        Renderer(tokenizer, tools=True)
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template"):
        Renderer(tokenizer).prompt_ids([{"role": "user", "content": "q"}], None)
