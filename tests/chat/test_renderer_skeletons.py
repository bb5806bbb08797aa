"""Suffixes without rendering: the same ids as by rendering, on any content, or not used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.testing.tokenizers import fix_tokenizer, qwen_like_tokenizer

TEMPLATES = ("qwen3", "qwen2_5", "compact")
CALLING = {
    "role": "assistant",
    "content": "c",
    "tool_calls": [tool_call(3, "f", {"x": 1}), tool_call(4, "g", {})],
}


def rule(tokenizer):
    return Renderer(tokenizer, tools=True)._suffixes


def results(*contents):
    names = [("f", "call00003"), ("g", "call00004")]
    return [
        {"role": "tool", "name": name, "tool_call_id": number, "content": content}
        for (name, number), content in zip(names, contents, strict=False)
    ]


def both(rule, contents, calling=CALLING):
    """Ids the quick way and by rendering."""
    end = rule._end.anchor
    answers = results(*contents)
    turn = {**calling, "tool_calls": calling["tool_calls"][: len(contents)]}
    return rule.ids(end, turn, answers, True), rule.encode(rule.text(end, turn, answers, True))


def skeletons(rule):
    return [skeleton for skeleton in rule._skeletons.values() if skeleton is not None]


TOKENIZERS = [fix_tokenizer("t0"), fix_tokenizer("grouped")]
TOKENIZERS += [qwen_like_tokenizer(name, seed=seed) for name in TEMPLATES for seed in (None, 1, 2)]
RULES = [rule(tokenizer) for tokenizer in TOKENIZERS]
CONTENTS = (
    st.text()
    | st.text("\n \t<>|/ab{}\"'_endtoolresponsei", max_size=40)
    | st.sampled_from(
        ["<tool_response>", "</tool_response>", "<|im_end|>\n", "<e>", "<|im_", "<b>user\n", "ab", "qzxsentinelaxzq0"]
    )
)


@pytest.mark.parametrize("index", range(len(RULES)))
@settings(max_examples=40)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=2))
def test_suffixes_from_skeletons_are_those_of_a_rendering(index, contents):
    quick, rendered = both(RULES[index], contents)
    assert quick == rendered
    assert skeletons(RULES[index])


@pytest.mark.parametrize("index", range(len(RULES)))
def test_no_rendering_is_needed_once_a_shape_is_known(index, monkeypatch):
    rule = RULES[index]
    both(rule, ["a", "b"])
    monkeypatch.setattr(rule, "text", None)
    other = {**CALLING, "tool_calls": [tool_call(8, "f", {"y": 2}), tool_call(9, "g", {"z": 0})]}
    answers = [{**r, "tool_call_id": c["id"]} for r, c in zip(results("new\n", ""), other["tool_calls"], strict=True)]
    assert rule.ids(rule._end.anchor, other, answers, True)


@pytest.mark.parametrize(
    "written",
    [
        "message.content | trim",
        "message.content | tojson",
        "(message.content | replace('\\n', ' '))",
        "message.content[:500]",
        "message.content or 'nothing'",
        "message.content.split('</think>')[-1]",
        "('ERROR' if message.content.startswith('Traceback') else message.content)",
        "('' if message.content == 'secret' else message.content)",
        "(message.content | replace('ab', 'c'))",
        "message.content ~ (message.content | length | string)",
    ],
)
def test_a_template_that_does_more_with_a_content_than_to_write_it_is_rendered(written):
    tokenizer = fix_tokenizer("grouped")
    tokenizer.chat_template = tokenizer.chat_template.replace("'<r>' + message.content", f"'<r>' + ({written})")
    made = rule(tokenizer)
    for content in (" x\n", "ab", "", "Traceback: y", "secret", "a</think>b", "long " * 999):
        quick, rendered = both(made, [content])
        assert quick == rendered
    assert not skeletons(made)


def test_a_template_that_writes_the_ids_of_calls_gets_the_real_ones():
    tokenizer = fix_tokenizer("grouped")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "'<r>' + message.content", "'<r>' + message.tool_call_id + message.content"
    )
    made = rule(tokenizer)
    for number in (3, 77):
        answer = [{"role": "tool", "name": "f", "tool_call_id": f"call{number:05d}", "content": "x"}]
        turn = {**CALLING, "tool_calls": [tool_call(number, "f", {})]}
        assert f"call{number:05d}x" in tokenizer.decode(made.ids(2, turn, answer, True))
    assert not skeletons(made)  # models write ids of their own, so what was rendered once would hardly ever serve again


def test_a_result_is_matched_with_its_call_by_id_whatever_the_ids_are():
    """A template that looks the name of the tool up by the call's id; results in another order than the calls."""
    tokenizer = fix_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- (message.content or '')",
        "{%- if message.role == 'tool' -%}{%- for earlier in messages -%}"
        "{%- for call in earlier.tool_calls or [] -%}"
        "{{- call.function.name + '=' if call.id == message.tool_call_id else '' -}}"
        "{%- endfor -%}{%- endfor -%}{%- endif -%}{{- (message.content or '')",
    )
    made = rule(tokenizer)
    for order in (1, -1):
        text = tokenizer.decode(made.ids(2, CALLING, results("A", "B")[::order], True))
        assert text == "".join(f"\n<b>tool\n{item}<e>" for item in ("f=A", "g=B")[::order]) + "\n<b>assistant\n"


@pytest.mark.parametrize("token", ["</tool_response>\n", "x</tool_response>", "<tool_response>\nab"])
def test_a_content_that_melts_into_the_tokens_around_it_is_encoded_with_them(token):
    tokenizer = qwen_like_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False)])
    made = rule(tokenizer)
    for content in ("x", "ab", "abx", "plain", "\n", "<tool_response>"):
        quick, rendered = both(made, [content])
        assert quick == rendered


def test_a_tokenizer_that_pads_and_truncates_elsewhere_changes_no_suffix():
    tokenizer = qwen_like_tokenizer()
    made = rule(tokenizer)
    expected = both(made, ["a result that is not short"])[0]
    tokenizer(["a", "bcd"], padding="max_length", truncation=True, max_length=5)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert both(made, ["a result that is not short"])[0] == expected
