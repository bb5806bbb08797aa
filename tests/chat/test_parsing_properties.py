"""Properties of parsing over all syntaxes: exact, total, linear."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.chat.formats import CallSyntax, TurnFormat
from agentrl.chat.parsing import parse_turn
from tests.chat.growth import seconds_of
from tests.chat.written_calls import WRITERS, tool_schemas

MARKS = {
    CallSyntax.HERMES: ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": 1}}', "["],
    CallSyntax.XML: ["<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>"],
    CallSyntax.GLM: ["<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    CallSyntax.DEEPSEEK: [
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>f",
        "\n```json\n",
        "{}",
        "```",
        "<｜tool▁call▁end｜>",
    ],
    CallSyntax.LLAMA: ["<|python_tag|>", '{"name": "f", "parameters": ', "{}", "}", ";"],
    CallSyntax.PYTHONIC: ["\n[f(", "a=", "1", ")", "]", "<|python_start|>", "<|python_end|>"],
    CallSyntax.LFM2: ["<|tool_call_start|>", "[f(", "a=", "1", ")", "]", "<|tool_call_end|>"],
    CallSyntax.MISTRAL: ["[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", '[{"name": "f", "arguments": {}}]', "{"],
    CallSyntax.HARMONY: [
        "<|start|>assistant",
        "<|channel|>commentary",
        " to=functions.f",
        "<|message|>",
        "{}",
        "<|end|>",
    ],
    CallSyntax.BEAM: [
        "<|start|>assistant",
        " to=f<|channel|>analysis",
        "<|message|>",
        '<rfl:parameter name="a">',
        "\n1\n",
        "</rfl:parameter>",
        "<|end|>",
    ],
    CallSyntax.COHERE: ["<|START_ACTION|>", '[{"tool_name": "f", "parameters": {}}]', "<|END_ACTION|>", "["],
    CallSyntax.GEMMA: ["<|tool_call>", "call:f{", "a:", '<|"|>', "}", "<tool_call|>", "None"],
    CallSyntax.FUNCTION_GEMMA: ["<start_function_call>", "call:f{", "a:", "<escape>", "}", "<end_function_call>"],
    CallSyntax.PHI: ["<|tool_call|>", '[{"name": "f", "arguments": {}}]', "<|/tool_call|>", "["],
    CallSyntax.PYTHON_TAGS: ["<code>", "f(", "a=1", ")", "</code>"],
}
COMMON = ["<think>", "</think>", "\n", " ", '"', "'", "\\", '\\"', "{", "}", "[", "]", ",", ":", "é🙂", "\\ud83d", "x"]
TOOLS = tool_schemas([("f", {"a": 1})])

every_syntax = pytest.mark.parametrize("syntax", MARKS, ids=str)
every_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


def prompt_of(syntax):
    return "<|start|>assistant" if syntax in (CallSyntax.HARMONY, CallSyntax.BEAM) else ""


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    # words of Python's or JSON's literals are no names of arguments there
    lambda name: name not in ("null", "true", "false")
)
delimiters = st.sampled_from([mark for marks in MARKS.values() for mark in marks] + COMMON)
texts = st.lists(delimiters | st.text(st.characters(codec="utf-8"), max_size=8), max_size=4).map("".join)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3, unique_by=lambda c: c[0]
)

# What a value must not hold because the syntax has no way to write it.
UNWRITABLE = {
    CallSyntax.XML: "</parameter>",
    CallSyntax.GLM: "</arg_value>",
    CallSyntax.BEAM: "</rfl:parameter>",
    CallSyntax.GEMMA: '<|"|>',
    CallSyntax.FUNCTION_GEMMA: "<escape>",
}


@every_writer
@settings(max_examples=30)
@given(written=calls)
def test_parse_of_what_was_written_gives_the_calls(write, written):
    """parse(render(calls)) == calls, types included."""
    syntax = WRITERS[write]
    unwritable = UNWRITABLE.get(syntax)
    assume(unwritable is None or not any(unwritable in text for text in _strings(written)))
    turn = parse_turn(write(written), TurnFormat(syntax), prompt=prompt_of(syntax), tools=tool_schemas(written))
    assert [call.error for call in turn.calls] == [None] * len(written)
    read = [(call.name, call.arguments) for call in turn.calls]
    assert read == written
    assert json.dumps(read) == json.dumps(written)  # 1 is not True, 1.0 is not 1
    assert turn.message["content"] == ""


def _strings(value):
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _strings(inner)


@every_syntax
@settings(max_examples=60)
@given(data=st.data())
def test_parsing_never_raises(syntax, data):
    """Any text gives a message that can be written as JSON, and calls that are readable or say why not."""
    pieces = st.sampled_from(MARKS[syntax] + COMMON) | st.text(max_size=4)
    text = "".join(data.draw(st.lists(pieces, max_size=25)))
    turn = parse_turn(text, TurnFormat(syntax), prompt=prompt_of(syntax), tools=TOOLS)
    assert isinstance(turn.message["content"], str)
    json.dumps(turn.message)
    for call in turn.calls:
        assert isinstance(call.arguments, dict)
        assert call.error is not None or call.name


def _seconds(text, syntax):
    return seconds_of(lambda: parse_turn(text, TurnFormat(syntax), prompt=prompt_of(syntax), tools=TOOLS))


def _rows(syntax):
    """Texts that a reader with a search too many takes quadratic time for."""
    marks = MARKS[syntax]
    units = [marks[0], "".join(marks), "".join(marks[:-1]), "".join(marks[:2]), "<think>", "</think>", "\n" + marks[0]]
    units += [marks[0] + middle + marks[-1] for middle in ('["', "['", '[\\"', "[\\'", "{{", '{"a', " " * 50)]
    units += ["".join(marks[:3]) + quote for quote in ('"', "'", '\\"', '<|"|>"', "<escape>")]
    return [*units, *("".join(marks[:k]) + "x" for k in range(1, len(marks)))]


@every_syntax
def test_the_time_is_linear_in_the_text_whatever_it_is_d10(syntax):
    """Eight times the text takes about eight times as long, not sixty-four times."""
    for unit in dict.fromkeys(_rows(syntax)):
        count = max(1, 4000 // len(unit))
        short, long = _seconds(unit * count, syntax), _seconds(unit * count * 8, syntax)
        assert long < 25 * short + 0.01, (unit, short, long)


@every_writer
def test_the_time_is_linear_in_the_calls_of_a_turn_that_was_cut_d10(write):
    """As `test_a_row_of_calls_and_a_cut_one`, and eight times as many."""
    rows = [write([("f", {"a": 1})] * calls) for calls in (23, 8 * 23)]
    short, long = (_seconds(text[: text.rindex("1") + 1], WRITERS[write]) for text in rows)
    assert long < 25 * short + 0.01
