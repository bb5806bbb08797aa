"""Sampled ids to messages and calls."""

import json

import pytest

from agentrl.chat.formats import CallSyntax, TurnFormat
from agentrl.chat.parsing import parse_turn
from agentrl.chat.renderer import Renderer
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import EOS, fix_tokenizer, qwen_like_tokenizer
from tests.chat.growth import seconds_of

IM_END = "<|im_end|>"
RENDERER = Renderer(qwen_like_tokenizer(), tools=True)


def parse(text, renderer=RENDERER, **options):
    return renderer.parse(renderer._tokenizer.encode(text), None, **options)


def call(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def arguments(turn):
    return [item.arguments for item in turn.calls]


def test_several_calls_of_a_turn_come_in_order_d01():
    turn = parse(call("mul", {"a": 3, "b": 4}) + "\n" + call("add", {"a": 1, "b": 2}) + IM_END)
    assert [(item.name, item.arguments) for item in turn.calls] == [
        ("mul", {"a": 3, "b": 4}),
        ("add", {"a": 1, "b": 2}),
    ]
    assert turn.message["content"] == ""
    assert [item["function"]["name"] for item in turn.message["tool_calls"]] == ["mul", "add"]


def test_ids_of_calls_are_unique_within_a_rollout():
    first, second = parse(call("f", {}) * 2), parse(call("f", {}), first_call=2)
    ids = [item.id for item in (*first.calls, *second.calls)]
    assert len(set(ids)) == 3
    assert [item["id"] for item in first.message["tool_calls"]] == ids[:2]


def test_nested_arguments_stay_nested_d03():
    nested = {"req": {"query": "ab", "mode": "rrf"}, "tags": ["x", {"y": [1, None, True]}]}
    assert arguments(parse(call("f", nested))) == [nested]


def test_json_types_are_kept_d05():
    values = {"n": 7, "f": True, "s": "null", "t": "123", "o": [{"a": True, "b": None}], "q": None}
    assert arguments(parse(call("f", values))) == [values]


@pytest.mark.parametrize(
    "body",
    [
        '{"name":"f"}',
        '{"arguments":{}}',
        '{"name":3,"arguments":{}}',
        '{"name":"f","arguments":null}',
        '["f"]',
        "",
    ],
)
def test_a_malformed_call_is_an_error_that_a_template_can_render_d06(body):
    turn = parse(f"<tool_call>{body}</tool_call>{IM_END}")
    assert [bool(item.error) for item in turn.calls] == [True]
    assert "cannot be read" in turn.calls[0].error
    result = {"role": "tool", "name": "", "tool_call_id": turn.calls[0].id, "content": turn.calls[0].error}
    assert RENDERER.prompt_ids([{"role": "user", "content": "q"}, turn.message, result], None)
    assert RENDERER.suffix_ids(258, turn.message, [result], None)


def test_one_bad_call_does_not_lose_the_others_d07():
    bad = '<tool_call>{"name": "sh", "arguments": {"cmd": "ls</tool_call>'
    turn = parse(call("f", {"x": 1}) + bad + call("g", {"y": 2}))
    assert [bool(item.error) for item in turn.calls] == [False, True, False]
    assert [item.name for item in turn.calls] == ["f", "", "g"]
    assert "not valid JSON" in turn.calls[1].error
    assert [item["id"] for item in turn.message["tool_calls"]] == [item.id for item in turn.calls]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"{\\"x\\": 1}"', {"x": 1}),
        (json.dumps(json.dumps('{"x": 1}')), {"x": 1}),
        ("[1,2]", None),
        ("3", None),
        ("null", None),
        ('"abc"', None),
    ],
)
def test_arguments_that_are_a_string_are_decoded_again_and_other_types_are_errors_d08(written, expected):
    turn = parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert arguments(turn) == [expected or {}]
    assert bool(turn.calls[0].error) is (expected is None)


def test_every_call_of_a_cut_answer_without_names_is_an_error_d10():
    turn = parse('<tool_call>{"a":1}</tool_call>\n' * 22 + '<tool_call>{"a":')
    assert len(turn.calls) == 23
    assert all(item.error for item in turn.calls)


def test_the_time_of_parsing_is_linear_d10():
    """Markers that do not occur must not be looked for up to the end of a long answer after every call."""
    form, lengths = TurnFormat(CallSyntax.HERMES), (250, 2000)
    texts = [call("f", {}) * count + "x" * (1500 * count) for count in lengths]
    short, long = (seconds_of(lambda text=text: parse_turn(text, form, prompt="")) for text in texts)
    assert long < 25 * short + 0.01
    assert len(parse_turn(texts[1], form, prompt="").calls) == 2000


def test_every_prefix_of_an_answer_parses_d10():
    text = "<think>\nhm\n</think>\n\nSee.\n" + call("f", {"x": [1, "é"]}) + "\n" + call("g", {})
    ids = RENDERER._tokenizer.encode(text)
    for size in range(len(ids) + 1):
        turn = RENDERER.parse(ids[:size], None)
        assert isinstance(turn.message["content"], str)
        whole = [item for item in turn.calls if not item.error]
        assert whole == [] or whole[0].arguments == {"x": [1, "é"]}


def test_deeply_nested_json_is_an_unreadable_call_d10():
    turn = parse('<tool_call>{"name": "f", "arguments": ' + "[" * 20000 + "</tool_call>" + call("g", {}))
    assert [bool(item.error) for item in turn.calls] == [True, False]


def test_the_stop_token_is_never_in_the_content_nor_in_arguments_d11():
    assert parse("hi" + IM_END).message["content"] == "hi"
    unclosed = parse('<tool_call>{"name": "f", "arguments": {"x": "y"}}' + IM_END)
    assert arguments(unclosed) == [{"x": "y"}]
    other = Renderer(qwen_like_tokenizer(), tools=True, eos_ids=[256])
    assert parse("hi<|endoftext|>", other).message["content"] == "hi"


def test_the_next_render_has_one_end_of_turn_at_the_seam_d11():
    turn = parse("hi" + IM_END)
    ids = RENDERER.prompt_ids([{"role": "user", "content": "q"}, turn.message, {"role": "user", "content": "r"}], None)
    assert f"hi{IM_END}\n<|im_start|>user" in RENDERER._tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("42", "42", None),
        ("<think>abc", "", "abc"),
        ("abc</think>42", "42", "abc"),
        ("<think>abc</think>42", "42", "abc"),
        ("<think>\n\n</think>\n\n42", "42", ""),
        ("<think>a</think>b</think>c", "b</think>c", "a"),
    ],
)
def test_reasoning_is_split_off_d12(text, content, reasoning):
    message = parse(text + IM_END).message
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_a_think_block_that_the_generation_prompt_opened_is_reasoning_d12():
    tokenizer = qwen_like_tokenizer("compact")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n' if add", "assistant\\n<think>\\n' if add")
    renderer = Renderer(tokenizer)
    message = parse(f"abc</think>42{IM_END}", renderer).message
    assert (message["content"], message["reasoning_content"]) == ("42", "abc")
    assert parse("abc", renderer).message["reasoning_content"] == "abc"


@pytest.mark.parametrize("opening", ["<think>", ""])
def test_a_call_inside_reasoning_is_no_call_d13(opening):
    turn = parse(opening + "maybe " + call("rm", {}) + "</think>done")
    if opening:
        assert (turn.calls, turn.message["content"]) == ([], "done")
    else:
        # Documented: without an opening tag, a call before the closing one is a call.
        assert [item.name for item in turn.calls] == ["rm"]


def test_a_closing_think_tag_inside_an_argument_splits_nothing_d13():
    turn = parse(call("write", {"text": "a</think>b"}))
    assert arguments(turn) == [{"text": "a</think>b"}]


def test_unicode_in_arguments_reads_alike_raw_and_escaped_d15():
    values = {"city": "Zürich", "note": "東京 🙂"}
    escaped = "<tool_call>" + json.dumps({"name": "f", "arguments": values}) + "</tool_call>"
    assert "\\u" in escaped
    for turn in (parse(call("f", values)), parse(escaped)):
        assert arguments(turn) == [values]
        text = RENDERER._tokenizer.decode(
            RENDERER.prompt_ids([{"role": "user", "content": "q"}, turn.message, turn.message], None)
        )
        assert "Zürich" in text
        assert "\\u" not in text


def test_half_a_surrogate_pair_is_unreadable_d15():
    turn = parse('<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>')
    assert "half a character" in turn.calls[0].error


@pytest.mark.parametrize(("after", "content"), [("", "Let me check."), (" ok?", "Let me check.\nok?")])
def test_text_around_a_call_is_content_d16(after, content):
    turn = parse("Let me check.\n" + call("w", {}) + after + IM_END)
    assert [item.name for item in turn.calls] == ["w"]
    assert turn.message["content"] == content


def test_the_tokenizers_own_response_template_comes_first():
    tokenizer = fix_tokenizer()
    renderer = Renderer(tokenizer, tools=True)
    text = 'See.<call>{"name": "f", "arguments": {"x": 1}}</call>ok<call>{"name": "g"</call>'
    turn = renderer.parse([*tokenizer.encode(text), EOS], None)
    assert turn.message["content"] == "See.\nok"
    assert [(item.name, bool(item.error)) for item in turn.calls] == [("f", False), ("", True)]


def test_types_of_a_format_that_writes_bare_text_come_from_the_schema_d05():
    tokenizer = fix_tokenizer()
    tokenizer.response_template["fields"]["tool_calls"] = {
        "open_pattern": r"<call>(?P<name>\w+)",
        "close": "</call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<(?P<key>\w+)=(?P<value>.*?)>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    types = {
        "n": "integer",
        "f": "boolean",
        "s": "string",
        "t": "string",
        "o": "array",
        "q": ["integer", "null"],
    }
    properties = {name: {"type": kind} for name, kind in types.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    text = '<call>f<n=7><f=True><s=null><t=123><o=[{"a":true,"b":null}]><q=None></call>'
    turn = Renderer(tokenizer, tools=True).parse(tokenizer.encode(text), tools)
    expected = {"n": 7, "f": True, "s": "null", "t": "123", "o": [{"a": True, "b": None}], "q": None}
    assert arguments(turn) == [expected]


def test_an_invalid_response_template_is_refused():
    tokenizer = fix_tokenizer()
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(TemplateError, match=r"tokenizer\.response_template"):
        Renderer(tokenizer, tools=True)


@pytest.mark.parametrize("name", ["t0", "grouped"])
def test_a_format_of_json_between_markers_is_found_by_rendering(name):
    tokenizer = fix_tokenizer(name)
    tokenizer.response_template = None
    turn = parse('See.<call>{"name": "f", "arguments": {"x": 1}}</call>', Renderer(tokenizer, tools=True))
    assert turn.message["content"] == "See."
    assert [(item.name, item.arguments) for item in turn.calls] == [("f", {"x": 1})]


def test_other_names_of_the_keys_are_found_by_rendering():
    tokenizer = qwen_like_tokenizer("compact")
    tokenizer.chat_template = tokenizer.chat_template.replace('"name"', '"tool"').replace('"arguments"', '"parameters"')
    renderer = Renderer(tokenizer, tools=True)
    turn = parse('<tool_call>{"tool": "f", "parameters": {"x": 1}}</tool_call>', renderer)
    assert [(item.name, item.arguments) for item in turn.calls] == [("f", {"x": 1})]
    assert parse('<tool_call>{"tool": "f"}</tool_call>', renderer).calls[0].error


def test_an_unknown_format_is_refused_with_the_setting():
    tokenizer = fix_tokenizer()
    tokenizer.response_template = None
    tokenizer.chat_template = tokenizer.chat_template.replace(
        '\'<call>{"name": "\' + call.function.name + \'", "arguments": \'', "call.function.name + '='"
    )
    with pytest.raises(TemplateError, match=r"tokenizer\.response_template"):
        Renderer(tokenizer, tools=True)
