"""Calls of the Gemma family: `call:name{key:value}`, JSON with bare keys and its own marker around strings.

The text is turned into JSON in one pass, string by string, and then read as JSON. (transformers reads this
dialect too, in time that grows with the square of the number of strings.)
"""

from __future__ import annotations

import json
import re

from agentrl.chat.calls.reading import Schemas, Syntax, Text, Unreadable, WrittenCall
from agentrl.chat.calls.values import read_json

_NAME = re.compile(r"\s*call:([^\s{}]+)\s*(?=\{)")


def gemma(opening: str, closing: str, quote: str, framing: tuple[str, ...]) -> Syntax:
    """The syntax with given markers.

    Args:
        opening: The marker in front of a call.
        closing: The marker behind it.
        quote: The marker on both sides of a string.
        framing: The marker of the results, which follows the calls and is no content.

    Returns:
        The syntax.
    """
    mark, end = re.escape(quote), re.escape(closing)
    # A whole string, the beginning of one, what stands only in strings, a bare key, the end of the call. With a
    # second kind of quotes a row of broken calls could hide each other's ends, and take quadratic time.
    tokens = re.compile(
        rf"{mark}(?P<string>.*?){mark}|(?P<cut>{mark})|(?P<foreign>[\"\\])"
        rf"|(?P<none>\bNone\b(?=\s*[,}}\]]))|(?P<key>(?<=[{{,])\s*[^\s{{}}\[\]:,\"\\]+\s*(?=:))|(?P<end>{end})",
        re.DOTALL,
    )

    def read(text: Text, opened: re.Match[str], _: Schemas) -> tuple[list[WrittenCall], int]:
        named = _NAME.match(text.text, opened.end())
        if named is None:
            raise Unreadable("it does not begin with call:name{")
        name, position = named.group(1), named.end()
        translated, stop = [], len(text.text)
        for token in tokens.finditer(text.text, position):
            translated.append(text.text[position : token.start()])
            position = token.end()
            if token["string"] is not None:
                translated.append(json.dumps(token["string"], ensure_ascii=False))
            elif token["key"] is not None:
                translated.append(json.dumps(token["key"].strip(), ensure_ascii=False))
            elif token["none"] is not None:  # as some of the templates print it
                translated.append("null")
            elif token["cut"] is not None:
                raise Unreadable("it is cut off within a string", name)
            elif token["foreign"] is not None:
                raise Unreadable(f"{token['foreign']} stands outside of a string; strings are put in {quote}", name)
            else:
                stop = token.end()
                break
        else:
            translated.append(text.text[position:])
        return [WrittenCall(name, _arguments("".join(translated), name))], stop

    return Syntax(re.escape(opening), read, closing, framing=framing)


def _arguments(source: str, name: str) -> dict[str, object]:
    text = Text(source)
    try:
        value, stop = read_json(text, 0)
    except Unreadable as error:
        raise Unreadable(str(error), name) from error
    if not isinstance(value, dict) or text.skip_space(stop) != len(source):
        raise Unreadable("its arguments are not one object", name)
    return value


GEMMA = gemma("<|tool_call>", "<tool_call|>", '<|"|>', ("<|tool_response>",))
FUNCTION_GEMMA = gemma("<start_function_call>", "<end_function_call>", "<escape>", ("<start_function_response>",))
