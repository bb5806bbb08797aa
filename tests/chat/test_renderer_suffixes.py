"""What stands between a sampled turn and the next one."""

import pytest

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import BOS, EOS, IMAGE, IMAGE_START, NEWLINE, fix_tokenizer

CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [tool_call(0, "f", {"x": 1}), tool_call(1, "g", {})],
}
RESULTS = [
    {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "A"},
    {"role": "tool", "name": "g", "tool_call_id": "call00001", "content": "B"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def suffix(tokenizer, assistant=CALLING, results=RESULTS, last_id=EOS, **options):
    renderer = Renderer(tokenizer, tools=True, **options)
    return tokenizer.decode(renderer.suffix_ids(last_id, assistant, results, TOOLS))


def test_parallel_tool_results_are_one_run_a04():
    assert suffix(fix_tokenizer("grouped")) == "<b>user<r>A</r><r>B</r><e><b>assistant|"


def test_the_newline_after_the_end_of_turn_comes_once_and_belongs_to_the_suffix_a06_b02():
    ids = Renderer(fix_tokenizer(), tools=True).suffix_ids(EOS, CALLING, RESULTS[:1], TOOLS)
    assert ids[:2] == [NEWLINE, BOS]


def test_the_suffix_ends_with_the_generation_prompt_b07():
    text = suffix(fix_tokenizer())
    assert text.endswith("<e>\n<b>assistant\n")
    assert text.count("<b>assistant\n") == 1


def test_a_template_that_refuses_orphan_tool_messages_gives_a_suffix_b03():
    tokenizer = fix_tokenizer()
    guard = (
        "{%- for message in messages -%}{%- if message.role == 'tool' and (loop.first or not ("
        "loop.previtem.role == 'tool' or loop.previtem.tool_calls)) -%}{{ raise_exception('orphan tool') }}"
        "{%- endif -%}{%- endfor -%}"
    )
    tokenizer.chat_template = guard + tokenizer.chat_template
    assert suffix(tokenizer) == "\n<b>tool\nA<e>\n<b>tool\nB<e>\n<b>assistant\n"


def test_a_template_that_wants_a_user_first_gives_a_suffix_b04():
    tokenizer = fix_tokenizer()
    guard = "{%- if messages[0].role not in ('system', 'user') -%}{{ raise_exception('who?') }}{%- endif -%}"
    tokenizer.chat_template = guard + tokenizer.chat_template
    assert suffix(tokenizer).endswith("<b>assistant\n")


def test_a_think_block_that_only_the_last_turn_gets_is_not_in_the_suffix_b06():
    tokenizer = fix_tokenizer("grouped")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<b>' + message.role + '|' + content",
        "{%- set first = '<think>\n\n</think>\n\n' if loop.last and message.role == 'assistant' else '' -%}"
        "{{- '<b>' + message.role + '|' + first + content",
    )
    renderer = Renderer(tokenizer)
    ids = renderer.suffix_ids(EOS, CALLING, RESULTS[:1], TOOLS)
    assert tokenizer.decode(ids) == "<b>user<r>A</r><e><b>assistant|"


def test_a_turn_that_ended_on_another_eos_gets_what_follows_the_end_of_turn_e01():
    tokenizer = fix_tokenizer()
    renderer = Renderer(tokenizer, tools=True, eos_ids=[IMAGE])
    assert renderer.suffix_ids(IMAGE, CALLING, RESULTS, TOOLS) == renderer.suffix_ids(EOS, CALLING, RESULTS, TOOLS)


MARKERS = """
{%- if tools -%}{{- '<is>' + tools | tojson -}}{%- endif -%}
{%- for message in messages -%}
    {{- {'user': '<b>', 'tool': '<i>', 'assistant': '</is>', 'system': '<is>'}[message.role] -}}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<call>{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}</call>' -}}
    {%- endfor -%}
{%- endfor -%}
{{- '</is>' if add_generation_prompt else '' -}}
"""


def marker_tokenizer():
    """As GLM: no end-of-turn token, the marker of the next role (`<b>` user, `<i>` tool) ends a turn."""
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = MARKERS
    tokenizer.response_template = None
    return tokenizer


def test_a_sampled_role_marker_is_not_repeated_c05():
    tokenizer = marker_tokenizer()
    options = {"eos_ids": [EOS, BOS, IMAGE]}
    assert suffix(tokenizer, results=RESULTS[:1], last_id=IMAGE, **options) == "A</is>"
    assert suffix(tokenizer, results=RESULTS, last_id=IMAGE, **options) == "A<i>B</is>"
    assert suffix(tokenizer, results=RESULTS[:1], last_id=BOS, **options) == "A</is>"


def test_a_role_marker_that_was_not_sampled_is_in_the_suffix_c05():
    assert suffix(marker_tokenizer(), results=RESULTS[:1], eos_ids=[IMAGE]) == "<i>A</is>"


def test_role_markers_stop_only_where_they_are_declared_c05():
    assert Renderer(marker_tokenizer(), tools=True, eos_ids=[IMAGE]).stop_ids == {EOS, IMAGE}
    assert Renderer(marker_tokenizer(), tools=True).stop_ids == {EOS}


def test_a_template_without_any_end_of_turn_is_refused():
    tokenizer = marker_tokenizer()
    tokenizer.chat_template = MARKERS.replace("<b>", "[U]").replace("<i>", "[T]").replace("</is>", "[A]")
    with pytest.raises(TemplateError, match="no special token that ends a turn"):
        Renderer(tokenizer, tools=True)


@pytest.mark.parametrize("text", ["<e>", "x<e>\n<b>user\ny", "stand-in"])
def test_results_that_contain_markers_do_not_move_the_cut(text):
    results = [{**RESULTS[0], "content": text}]
    assert suffix(fix_tokenizer(), results=results) == f"\n<b>tool\n{text}<e>\n<b>assistant\n"


def test_turns_of_every_shape_have_the_same_suffix_here():
    tokenizer = fix_tokenizer()
    shapes = [
        CALLING,
        {**CALLING, "content": "ab <e> ab"},
        {**CALLING, "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "", {})]},
        {"role": "assistant", "content": "x"},
    ]
    assert len({suffix(tokenizer, shape) for shape in shapes}) == 1


def test_the_names_of_the_called_tools_are_the_real_ones():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- (message.content or '')",
        "{%- if message.role == 'tool' -%}{%- for earlier in messages -%}"
        "{%- for call in earlier.tool_calls or [] -%}"
        "{{- call.function.name + '=' if call.id == message.tool_call_id else '' -}}"
        "{%- endfor -%}{%- endfor -%}{%- endif -%}{{- (message.content or '')",
    )
    assert suffix(tokenizer) == "\n<b>tool\nf=A<e>\n<b>tool\ng=B<e>\n<b>assistant\n"


def test_images_in_the_vocabulary_are_no_stop_tokens():
    assert IMAGE_START not in Renderer(fix_tokenizer(), tools=True).stop_ids
