"""What Arrow and authors put into messages, and what a template then reads."""

import copy
import json

import pytest
from datasets import Dataset

from agentrl.chat.messages import clean_columns, clean_messages
from agentrl.chat.renderer import Renderer
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import fix_tokenizer

STRICT = "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
LENIENT = "{{ call.function.arguments }}"
CALLS = (
    "{%- for message in messages -%}<b>{{ message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}ARGUMENTS{%- endfor -%}<e>{{ '\n' }}{%- endfor -%}"
    "{{ '<b>assistant\n' if add_generation_prompt else '' }}"
)


def rendered(arguments_template, call):
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = CALLS.replace("ARGUMENTS", arguments_template)
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "5"},
    ]
    before = copy.deepcopy(messages)
    text = tokenizer.decode(Renderer(tokenizer).prompt_ids(messages, None))
    assert messages == before
    return text


def test_arguments_given_as_a_string_render_in_a_strict_template_c06():
    assert "city=Oslo" in rendered(STRICT, {"name": "f", "arguments": '{"city":"Oslo"}'})


@pytest.mark.parametrize(
    "call",
    [{"name": "f", "arguments": text} for text in ("not json", "[1,2]", "null")] + [{"name": "f"}],
)
def test_arguments_that_are_no_mapping_do_not_raise_in_a_strict_template_c06(call):
    assert "<b>assistant\n<e>\n" in rendered(STRICT, call)


@pytest.mark.parametrize("text", ['{"city":"Oslo"}', "not json", "[1,2]", "null"])
def test_a_lenient_template_prints_string_arguments_byte_for_byte_c06(text):
    assert f"<b>assistant\n{text}<e>" in rendered(LENIENT, {"name": "f", "arguments": text})


def test_a_lenient_template_never_prints_the_repr_of_a_dict_c06():
    assert '<b>assistant\n{"city": "Oslo"}<e>' in rendered(LENIENT, {"name": "f", "arguments": {"city": "Oslo"}})


def test_keys_that_arrow_inserted_into_messages_are_dropped_c07():
    def row(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {
            "prompt": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        }

    rows = [row({"a": 1}), row({"b": 2})]
    read = [Dataset.from_list(rows)[index]["prompt"] for index in range(2)]
    assert read[0] != rows[0]["prompt"], "Arrow no longer inserts None: this test has lost its point"
    assert [clean_messages(messages) for messages in read] == [item["prompt"] for item in rows]


def test_prompts_are_rendered_without_what_arrow_inserted_c07():
    text = rendered("{{ call.function.arguments | tojson }}", {"name": "f", "arguments": {"a": 1, "b": None}})
    assert '<b>assistant\n{"a": 1}<e>' in text


def test_keys_that_arrow_inserted_into_columns_are_dropped_but_columns_stay_c07():
    rows = [{"answer": None, "setup": {"a": 1}}, {"answer": "x", "setup": {"b": [None, 2]}}]
    read = Dataset.from_list(rows)
    assert [clean_columns(read[index]) for index in range(2)] == rows


def test_content_of_text_blocks_is_joined_and_the_messages_stay_as_they_are_c08():
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    before = copy.deepcopy(messages)
    tokenizer = fix_tokenizer()
    assert tokenizer.decode(Renderer(tokenizer).prompt_ids(messages, None)).startswith("<b>user\nhi<e>")
    assert messages == before


def test_content_that_is_not_text_is_refused_with_the_place():
    messages = [{"role": "user", "content": "q"}, {"role": "tool", "content": [{"type": "image"}]}]
    with pytest.raises(TemplateError, match=r"message 1 \(tool\)"):
        Renderer(fix_tokenizer()).prompt_ids(messages, None)


def test_empty_and_missing_content_are_the_same_b05():
    renderer = Renderer(fix_tokenizer(), tools=True)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [{"role": "assistant", "tool_calls": [call]} | extra for extra in ({}, {"content": None}, {"content": ""})]
    prompts = [renderer.prompt_ids([turn, {"role": "tool", "content": "5"}], None) for turn in turns]
    assert prompts[0] == prompts[1] == prompts[2]


def test_characters_outside_ascii_are_rendered_as_they_are_d15():
    call = {"name": "f", "arguments": json.dumps({"city": "Zürich"})}
    assert "Zürich" in rendered(STRICT, call)
    assert '"Zürich"' in rendered(LENIENT, {"name": "f", "arguments": {"city": "Zürich"}})
