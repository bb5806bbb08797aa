"""Twenty forks of known templates: recognised, repaired or refused, and never silently wrong.

Wrong is a row that differs from the full rendering of a reference that keeps its turns: TRL's training template of the
family, changed in the same way.
"""

import importlib.util
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from agentrl.chat.families import recognise
from agentrl.chat.prefix import PROBE_TOOLS, call_id, first_break, tool_call
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.chat.family_rounds import DOCS

REFERENCES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
BOTH = ("qwen2_5", "qwen3")
BETWEEN = re.compile(r"(<!-- written by `python -m tests.chat.test_template_mutations` -->\n)(.*?)(<!-- end -->)", re.S)


def exchange(*pairs):
    """Replace texts; each has to be there."""

    def change(source):
        for old, new in pairs:
            assert old in source, old
            source = source.replace(old, new)
        return source

    return change


def pattern(old, new):
    def change(source):
        changed, count = re.subn(old, new, source)
        assert count, old
        return changed

    return change


def swap_branches(source):
    """The branch of tool messages in front of that of the assistant's."""
    assistant = re.search(r"\n *{%- elif message\.role == .assistant. %}", source).start()
    tool = re.search(r"\n *{%- elif message\.role == .tool. %}", source).start()
    end = re.compile(r"\n *{%- endif %}\n{%- endfor %}").search(source, tool).start()
    return source[:assistant] + source[tool:end] + source[assistant:tool] + source[end:]


MUTATIONS = {
    "a comment in front": (BOTH, lambda source: "{#- my fork -#}" + source),
    "a comment at the end": (BOTH, lambda source: source + "{#- the end -#}"),
    "spaces at the ends of lines": (BOTH, pattern(r"%}\n", "%}  \n")),
    "tabs": (BOTH, pattern(r"(?m)^    ", "\t")),
    "a space in the heading": (BOTH, exchange(("# Tools", "#  Tools"))),
    "other words for the tools": (BOTH, exchange(("You may call", "You can use"))),
    "another default prompt": (("qwen2_5",), exchange(("You are Qwen, created by Alibaba Cloud.", "You are Bob."))),
    "an empty default prompt": (
        ("qwen2_5",),
        exchange(("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "")),
    ),
    "a renamed loop variable": (BOTH, pattern(r"\bmessage\b", "turn")),
    "a renamed namespace": (("qwen3",), pattern(r"\bns\b", "state")),
    "subscripts for attributes": (BOTH, pattern(r"message\.role", "message['role']")),
    "reordered branches": (BOTH, swap_branches),
    "characters as they are": (BOTH, pattern(r"\btojson\b", "tojson(ensure_ascii=False)")),
    "results on one line": (
        BOTH,
        exchange(("<tool_response>\\n", "<tool_response>"), ("\\n</tool_response>", "</tool_response>")),
    ),
    "a label in front of results": (BOTH, exchange(("<tool_response>\\n", "<tool_response>\\nResult: "))),
    "results cut": (BOTH, exchange(("'\\n</tool_response>'", "'\\n...\\n</tool_response>'"))),
    "results in a turn of their own": (BOTH, exchange(("'<|im_start|>user' }}", "'<|im_start|>tool' }}"))),
    "results numbered": (BOTH, exchange(("'\\n<tool_response>\\n'", "'\\n' ~ loop.index ~ '<tool_response>\\n'"))),
    "reasoning of the last turn only": (("qwen3",), exchange(("loop.index0 > ns.last_query_index", "loop.last"))),
    "a call without its arguments": (BOTH, pattern(r"tool_call\.arguments \| tojson", "'{}'")),
}


def read(name):
    return (REFERENCES / f"{name}.jinja").read_text(encoding="utf-8")


def conversations(thinking):
    for thought in ("field", "none") if thinking else ("none",):
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            for calls in (1, 2):
                messages = [*system, {"role": "user", "content": "How much?"}]
                reasoning = {"reasoning_content": "because"} if thought == "field" else {}
                for first in (0, calls):
                    made = [tool_call(n, "probe_called", {"key": "é"}) for n in range(first, first + calls)]
                    messages.append({"role": "assistant", "content": "Hm.", **reasoning, "tool_calls": made})
                    messages += [
                        {"role": "tool", "name": "probe_called", "tool_call_id": call_id(n), "content": f"<{n}> \n"}
                        for n in range(first, first + calls)
                    ]
                yield messages


def assert_rows_are_those_of(reference, renderer):
    """Play conversations as a model that writes like the reference, and compare whole rows."""
    encode, compared = renderer._suffixes.encode_all, 0
    for messages in conversations("</think>" in reference.source):
        if first_break(reference.render, messages, PROBE_TOOLS) is not None:
            continue
        compared += 1
        start = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        row = renderer.prompt_ids(messages[:start], PROBE_TOOLS)
        for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            turn, after = messages[index], index + 1 + len(messages[index]["tool_calls"])
            header = reference.render(messages[:index], PROBE_TOOLS, True)
            assert row == encode(header)
            sampled = reference.render(messages[: index + 1], PROBE_TOOLS, False).removeprefix(header).rstrip("\n")
            row += encode(sampled)
            row += renderer.suffix_ids(row[-1], turn, messages[index + 1 : after], PROBE_TOOLS)
        assert row == encode(reference.render(messages, PROBE_TOOLS, True))
    assert compared


CASES = [(name, mutation) for mutation, (names, _) in MUTATIONS.items() for name in names]


@cache
def became(name, mutation):
    """The fork's renderer; None where it is refused."""
    tokenizer = qwen_like_tokenizer()
    tokenizer.chat_template = MUTATIONS[mutation][1](read(name))
    assert recognise(tokenizer.chat_template) is not None
    with suppress(TemplateError):
        return Renderer(tokenizer, tools=True)


@pytest.mark.parametrize(("name", "mutation"), CASES)
def test_a_fork_is_never_silently_wrong(name, mutation):
    if (renderer := became(name, mutation)) is not None:
        reference = MUTATIONS[mutation][1](read(f"{name}_training"))
        assert_rows_are_those_of(Template(qwen_like_tokenizer(), reference, {}), renderer)


def table():
    """The table of docs/models.md."""
    words = {Origin.OWN: "its own is exact", Origin.FAMILY: "training template", Origin.REPAIRED: "repaired"}
    lines = ["| a fork with | Qwen2.5 | Qwen3 |", "| --- | --- | --- |"]
    for mutation, (names, _) in MUTATIONS.items():
        made = {name: became(name, mutation) for name in names}
        cells = [
            "" if name not in made else "refused" if made[name] is None else words[made[name].choice.origin]
            for name in BOTH
        ]
        lines.append(f"| {mutation} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documentation_says_what_became_of_the_forks():
    """Stale? `python -m tests.chat.test_template_mutations` writes it anew."""
    assert len(MUTATIONS) == 20
    assert BETWEEN.search(DOCS.read_text(encoding="utf-8"))[2].strip() == table()
    assert table().count("refused") == 3


def test_a_fork_that_writes_another_format_is_not_replaced_by_the_training_template_of_its_relatives():
    """The family is recognised, but its template would write results in another way than the fork does."""
    tokenizer = qwen_like_tokenizer()
    tokenizer.chat_template = MUTATIONS["a label in front of results"][1](read("qwen3"))
    choice = Renderer(tokenizer, tools=True).choice
    assert (choice.family, choice.origin) == ("Qwen3", Origin.REPAIRED)
    tokenizer.chat_template = read("qwen3")
    assert Renderer(tokenizer, tools=True).choice.origin is Origin.FAMILY


if __name__ == "__main__":
    DOCS.write_text(
        BETWEEN.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[3]}", DOCS.read_text(encoding="utf-8")), encoding="utf-8"
    )
