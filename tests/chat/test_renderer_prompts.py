"""Prompts to ids, and the ids that stop a turn."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.chat.renderer import Renderer
from agentrl.testing.tokenizers import BOS, EOS, PAD, fix_tokenizer, qwen_like_tokenizer

QUESTION = [{"role": "user", "content": "abc"}]


def test_text_is_encoded_as_the_tokenizer_does_it():
    tokenizer = fix_tokenizer()
    assert Renderer(tokenizer).prompt_ids("ab c", None) == tokenizer("ab c")["input_ids"]


def test_messages_get_the_generation_prompt():
    tokenizer = fix_tokenizer()
    ids = Renderer(tokenizer).prompt_ids(QUESTION, None)
    assert tokenizer.decode(ids) == "<b>user\nabc<e>\n<b>assistant\n"


def test_no_tools_and_an_empty_list_of_tools_are_the_same_c04():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = (
        "{% if tools is not none %}[TOOLS]{{ tools | length }}[/TOOLS]{% endif %}" + tokenizer.chat_template
    )
    renderer = Renderer(tokenizer)
    assert "[TOOLS]" not in tokenizer.decode(renderer.prompt_ids(QUESTION, []))
    assert renderer.prompt_ids(QUESTION, []) == renderer.prompt_ids(QUESTION, None)


def test_suffixes_know_no_empty_list_of_tools_either_c04():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<b>assistant\\n' if", "{{- '[TOOLS]' if tools is not none else '' -}}{{- '<b>assistant\\n' if"
    )
    renderer = Renderer(tokenizer)
    suffix = renderer.suffix_ids(EOS, {"role": "assistant", "content": "x"}, QUESTION, [])
    assert tokenizer.decode(suffix) == "\n<b>user\nabc<e>\n<b>assistant\n"


def test_a_last_message_of_the_assistant_is_continued():
    tokenizer = fix_tokenizer()
    ids = Renderer(tokenizer).prompt_ids([*QUESTION, {"role": "assistant", "content": "It is"}], None)
    assert tokenizer.decode(ids).endswith("<b>assistant\nIt is")


@pytest.mark.parametrize("pad", [None, "<e>", "<i>"])
def test_prompts_are_never_padded_whatever_the_pad_token_n01_n04(pad):
    tokenizer = fix_tokenizer()
    expected = Renderer(tokenizer).prompt_ids(QUESTION, None)
    tokenizer.pad_token = pad
    tokenizer.padding_side = "left"
    renderer = Renderer(tokenizer, tools=True)
    short, long = renderer.prompt_ids("ab", None), renderer.prompt_ids("abcde", None)
    assert (len(short), len(long)) == (1, 4)
    assert renderer.prompt_ids(QUESTION, None) == expected
    assert PAD not in expected


def test_pad_equal_to_eos_keeps_every_eos_e02():
    tokenizer = fix_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    history = [*QUESTION, {"role": "assistant", "content": "x"}, *QUESTION]
    ids = Renderer(tokenizer).prompt_ids(history, None)
    assert ids.count(EOS) == 3


def test_others_that_truncate_and_pad_with_the_same_tokenizer_change_no_prompt_f13():
    """Four renderers, and four threads that call the tokenizer as a reward model or a tool would."""
    tokenizer = qwen_like_tokenizer()
    texts = [f"question {i} " + "word " * 100 for i in range(100)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    alone = Renderer(tokenizer)
    expected = [alone.prompt_ids(prompt, None) for prompt in prompts]
    start = threading.Barrier(8)

    def render(renderer):
        start.wait()
        return [renderer.prompt_ids(prompt, None) for prompt in prompts]

    def call(max_length):
        start.wait()
        return [
            tokenizer(text, truncation=True, padding="max_length", max_length=max_length)["input_ids"] for text in texts
        ]

    with ThreadPoolExecutor(8) as threads:
        rendering = [threads.submit(render, Renderer(tokenizer)) for _ in range(4)]
        calling = [threads.submit(call, 8) for _ in range(4)]
        assert [future.result() for future in rendering] == [expected] * 4
        assert all(len(ids) == 8 for future in calling for ids in future.result())


def test_every_declared_eos_and_the_end_of_turn_stop_e01():
    tokenizer = fix_tokenizer()
    assert Renderer(tokenizer, eos_ids=[2, 9]).stop_ids == {2, 9}
    tokenizer.eos_token = "<i>"
    assert Renderer(tokenizer, eos_ids=[9]).stop_ids == {2, 4, 9}


def test_a_tokenizer_without_eos_stops_at_the_end_of_turn():
    tokenizer = fix_tokenizer()
    tokenizer.eos_token = None
    assert Renderer(tokenizer).stop_ids == {EOS}


def test_without_a_template_only_eos_stops():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = None
    renderer = Renderer(tokenizer)
    assert renderer.stop_ids == {EOS}
    assert renderer.parse([*tokenizer.encode("hi"), EOS], None).message["content"] == "hi"


def test_template_kwargs_reach_the_generation_prompt():
    tokenizer = qwen_like_tokenizer()
    quiet = Renderer(tokenizer, template_kwargs={"enable_thinking": False}, tools=True)
    assert tokenizer.decode(quiet.prompt_ids(QUESTION, None)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(Renderer(tokenizer).prompt_ids(QUESTION, None)).endswith("assistant\n")


def test_the_template_for_tools_is_taken_where_there_are_several():
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = {"default": "plain<e>", "tool_use": tokenizer.chat_template}
    renderer = Renderer(tokenizer, tools=True)
    assert renderer.prompt_ids(QUESTION, None)[0] == BOS


def test_text_leaves_special_tokens_out():
    tokenizer = fix_tokenizer()
    assert Renderer(tokenizer).text([*tokenizer.encode("ab c"), EOS]) == "ab c"
