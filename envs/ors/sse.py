"""Server-sent events, as the HTML standard parses them (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Pure: bytes in, events out, however the network cut them. One space after the colon is left out and no more: servers
send long results in pieces, and what a piece begins or ends with is content.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name ("message" when the stream gave none) and its data lines, joined by newlines."""

    name: str
    data: str


class EventParser:
    """Turns a stream of bytes into events."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._after_cr = False
        self._line: list[str] = []  # pieces of a line that has not ended
        self._name = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; gives the events that they complete.

        An event that no empty line ended is none, so what a broken stream leaves behind is dropped.

        Raises:
            UnicodeDecodeError: The stream is not UTF-8. (The standard replaces such bytes; a result that was altered
                on its way is of no use here.)
        """
        text = self._decoder.decode(data)
        if self._after_cr and text:
            text = text.removeprefix("\n")  # the second half of a line end that was cut in two
            self._after_cr = False
        if text:
            self._after_cr = text.endswith("\r")
        *ended, rest = _LINE_END.split(text)
        events = []
        for piece in ended:
            line = "".join([*self._line, piece])
            self._line.clear()
            if (event := self._take(line)) is not None:
                events.append(event)
        if rest:
            self._line.append(rest)
        return events

    def _take(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")  # a comment is a line whose field has no name
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
        self._name, self._data = "", []
        return event
