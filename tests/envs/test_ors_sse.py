"""Event streams: the parser against a plain reading of the standard, and against what the real server sends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.ors.sse import Event, EventParser

PIECE = 4096


def parse(stream: bytes, cuts: list[int] | None = None) -> list[Event]:
    """Feed a stream, cut at the given places."""
    parser = EventParser()
    edges = [0, *sorted(set(cuts or [])), len(stream)]
    return [event for a, b in itertools.pairwise(edges) for event in parser.feed(stream[a:b])]


def reference(stream: bytes) -> list[Event]:
    """The same, of a whole stream: blocks of lines, each ended by an empty line."""
    text = stream.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, name, data = [], "", []
    for line in text.split("\n")[:-1]:
        if line == "":
            if data:
                events.append(Event(name or "message", "\n".join(data)))
            name, data = "", []
            continue
        field, colon, value = line.partition(":")
        if colon and value[:1] == " ":
            value = value[1:]
        if field == "event":
            name = value
        if field == "data":
            data.append(value)
    return events


LINES = st.one_of(
    st.builds("data:{}{}".format, st.sampled_from(["", " ", "  "]), st.text("a é🙂:\t ", max_size=6)),
    st.builds("event: {}".format, st.sampled_from(["chunk", "end", "", " x"])),
    st.sampled_from(["", "", "", ":", ": ping", "data", "event", "id: 7", "retry: 10", "datax: y", "x:y:z"]),
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=14).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
)


@given(STREAMS, st.booleans(), st.data())
def test_any_stream_cut_anywhere_reads_as_the_standard_says(stream: bytes, mark: bool, data: st.DataObject) -> None:
    if mark:
        stream = "\ufeff".encode() + stream
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert parse(stream, cuts) == reference(stream)


@given(st.text(alphabet=st.sampled_from(' "\\aé🙂'), max_size=3 * PIECE + 5), st.integers(1, 50))
def test_a_result_sent_in_pieces_is_put_together_exactly(result: str, step: int) -> None:
    """Spaces at the edges of a piece are content; the official client loses them."""
    pieces = [result[i : i + PIECE] for i in range(0, len(result), PIECE)] or [""]
    stream = "".join(f"event: chunk\r\ndata: {piece}\r\n\r\n" for piece in pieces).encode()
    events = parse(stream, list(range(0, len(stream), step * 97)))
    assert "".join(event.data for event in events) == result


def test_one_space_is_left_out_and_no_more() -> None:
    assert parse(b"data:   two\n\ndata:none\n\ndata: \n\n") == [
        Event("message", "  two"),
        Event("message", "none"),
        Event("message", ""),
    ]


def test_data_lines_of_one_event_are_joined_and_comments_say_nothing() -> None:
    stream = b"event: error\ndata: first\n: ping\ndata: second\n\n"
    assert parse(stream) == [Event("error", "first\nsecond")]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: end\n\ndata: x\n\n") == [Event("message", "x")]


def test_half_an_event_is_none() -> None:
    assert parse(b"event: end\ndata: {}\n") == []


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_event_comes_as_soon_as_its_empty_line_has(end: bytes) -> None:
    parser = EventParser()
    assert parser.feed(b"data: x" + end) == []
    assert parser.feed(end) == [Event("message", "x")]
    assert parser.feed(b"data: y" + end + end) == [Event("message", "y")]


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        parse(b"data: \xff\n\n")
