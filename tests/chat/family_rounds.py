"""Episodes with the models of `members.py`: a scripted model writes as its template does, the engine runs the tools.

Run as a module it writes the table of docs/models.md anew: `python -m tests.chat.family_rounds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.families import FAMILIES, recognise
from agentrl.chat.formats import TurnFormat
from agentrl.chat.parsing import parse_turn
from agentrl.chat.prefix import first_break, missing_tool_parts, tool_call
from agentrl.chat.renderer import Renderer
from agentrl.chat.repair import Origin
from agentrl.errors import TemplateError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.tools import make_tools
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.types import Message, Outcome, Task, Trajectory
from tests.chat.members import NOT_AT_HAND, TOOL_USERS, Member
from tests.chat.written_calls import WRITERS
from tests.docs import tables

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- written by `python -m tests.chat.family_rounds` -->\n", "<!-- end -->\n"


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def look_up(word: str, tags: list[str], deep: bool = False) -> str:
    """Look up a word.

    Args:
        word: What to look up.
        tags: Where.
        deep: Whether to look everywhere.
    """
    return f"{word}: <b> in {tags}, {deep}\n"


TOOLS = [add, look_up]
SCHEMAS = [tool.schema for tool in make_tools(TOOLS).values()]
CALLS = [
    ("look_up", {"word": "Zürich, 東京", "tags": ["a b", "7"], "deep": True}),
    ("add", {"a": 3, "b": -4}),
    ("look_up", {"word": "007", "tags": []}),
]


@dataclass(frozen=True)
class Episode:
    """An episode that was played, and what it must be."""

    trajectory: Trajectory
    generator: ScriptedGenerator
    script: list[list[int]]
    expected_ids: list[int]
    messages: list[Message]


@cache
def renderer(member: Member, reasoning: Literal["keep", "fork"] = "keep", seed: int | None = None) -> Renderer:
    tokenizer, variables = member.tokenizer(seed), member.variables
    eos = member.eos_ids_of(tokenizer)
    return Renderer(tokenizer, tools=True, template_kwargs=variables, eos_ids=eos, reasoning=reasoning)


def thoughts(member: Member) -> tuple[str | None, ...]:
    """What its turns can have as reasoning: what its template shows, given what the generation prompt has written."""
    reasoning = recognise(member.source).format.reasoning
    template = renderer(member).choice.template
    prompt = template.generation_prompt
    turn = {"role": "assistant", "content": "x", getattr(reasoning, "field", ""): "because"}
    shown = "because" in template.render([{"role": "user", "content": "q"}, turn], None, False)
    if reasoning is None or reasoning.closing in prompt or not shown:
        return (None,)
    return ("because",) if reasoning.opening in prompt else (None, "because")


Round = tuple[str, list[tuple[str, dict[str, Any]]]]
"""What a turn says, and its calls."""


@cache
def play(member: Member, thought: str | None, parallel: bool) -> Episode:
    """Play three turns: one call, two calls (or one), and the answer.

    Args:
        member: The model.
        thought: The reasoning of every turn.
        parallel: Whether the second turn has two calls.
    """
    rounds = [("", CALLS[:1]), ("Let me see.", CALLS[1 : 3 if parallel else 2])]
    return play_rounds(member, renderer(member), thought, "Be brief.", rounds)


def play_rounds(
    member: Member, bridge: Renderer, thought: str | None, system: str | None, rounds: list[Round]
) -> Episode:
    """Play turns with calls, and an answer."""
    template = bridge.choice.template
    field = recognise(member.source).format.reasoning
    extra = {} if thought is None else {field.field: thought}
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "How much?"})
    prompt = list(messages)
    script: list[list[int]] = []

    def write(turn: Message, answers: list[Message]) -> None:
        """Let the model write a turn as the template does, up to the token on which it stops."""
        header = template.render(messages, SCHEMAS, True)
        whole = template.render([*messages, turn], SCHEMAS, False)
        assert whole.startswith(header)
        ids = encode(bridge, whole[len(header) :].rstrip("\n "))
        if ids[-1] not in bridge.stop_ids:  # the marker of the next role ends the turn
            ids.append(encode(bridge, "<|observation|>" if answers else "<|user|>")[0])
        script.append(ids)
        messages.extend([turn, *answers])

    number = 0
    for content, calls in rounds:
        made = [tool_call(index, *call) for index, call in enumerate(calls, number)]
        answers = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": globals()[name](**arguments)}
            for call, (name, arguments) in zip(made, calls, strict=True)
        ]
        write({"role": "assistant", "content": content, **extra, "tool_calls": made}, answers)
        number += len(calls)
    write({"role": "assistant", "content": "It is seven.", **extra}, [])

    expected = encode(bridge, template.render(messages, SCHEMAS, False).rstrip("\n "))
    expected += script[-1][-1:] if expected[-1] not in bridge.stop_ids else []
    generator = ScriptedGenerator([script])
    return Episode(run(bridge, generator, prompt), generator, script, expected, messages)


def run(bridge: Renderer, generator: ScriptedGenerator, prompt: list[Message]) -> Trajectory:
    engine = RolloutEngine(generator, bridge, tools=TOOLS)
    try:
        [trajectory] = engine.run([Task("g", 0, 0, prompt)])
    finally:
        engine.close()
    return trajectory


def rows_when_forked(member: Member, thought: str | None) -> int:
    """Play the same turns with `reasoning="fork"`: each is sampled from what the own template makes of what was said.

    Where it raises on that (GPT-OSS: text and reasoning beside a call), the turn is sampled from the row so far.

    Returns:
        In how many rows the episode ended.

    Raises:
        TemplateError: The own template cannot be used.
    """
    bridge = renderer(member, "fork")
    own = bridge.choice.template
    kept = play(member, thought, member.parallel)
    generator = ScriptedGenerator([kept.script])
    trajectory = run(bridge, generator, kept.messages[:2])
    assert_row_invariants(trajectory, generator.calls)
    turns = [index for index, message in enumerate(kept.messages) if message["role"] == "assistant"]
    assert len(generator.calls) == len(turns)
    for call, index in zip(generator.calls, turns, strict=True):
        with suppress(TemplateError):
            assert call.ids == encode(bridge, own.render(kept.messages[:index], SCHEMAS, True))
    return len(trajectory.rows)


def encode(bridge: Renderer, text: str) -> list[int]:
    return bridge._tokenizer.encode(text, add_special_tokens=False)


def assert_exact(episode: Episode) -> None:
    """The row is what the model was given and wrote, and equals one full render."""
    trajectory = episode.trajectory
    assert_row_invariants(trajectory, episode.generator.calls)
    assert trajectory.prompt_ids + trajectory.completion_ids == episode.expected_ids


def assert_read(episode: Episode) -> None:
    """The tools were called as the model wrote, and the answer is what it wrote."""
    trajectory = episode.trajectory
    assert trajectory.outcome is Outcome.FINISHED
    made = [result.call for turn in trajectory.turns for result in turn.results]
    written = [call["function"] for message in episode.messages for call in message.get("tool_calls", ())]
    assert [{"name": call.name, "arguments": call.arguments} for call in made] == written
    assert trajectory.completion[-1]["content"] == "It is seven."


def assert_reasoning_kept(episode: Episode, field: str, thought: str) -> None:
    """Every turn was read with its reasoning; that the row has it is in `assert_exact`."""
    turns = [message for message in episode.trajectory.completion if message["role"] == "assistant"]
    assert [turn.get(field) for turn in turns] == [thought] * len(turns)


def assert_read_as_written(form: TurnFormat, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Calls that are written as models of that format write them are read back."""
    [write] = [write for write, syntax in WRITERS.items() if syntax is form.calls]
    turn = parse_turn(write(calls), form, prompt="<|start|>assistant", tools=SCHEMAS)
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [(*call, None) for call in calls]


def assert_images_shown(member: Member) -> None:
    """The template in use shows an image in a question, and in a result."""
    template = renderer(member).choice.template
    call = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, "look_up", CALLS[0][1])]}

    def size(asked: int, answered: int) -> int:
        blocks = [[{"type": "text", "text": "See"}, *[{"type": "image"}] * count] for count in (asked, answered)]
        question = {"role": "user", "content": blocks[0]}
        result = {"role": "tool", "name": "look_up", "tool_call_id": call["tool_calls"][0]["id"], "content": blocks[1]}
        return len(template._apply([question, call, result], SCHEMAS, False))

    assert size(2, 1) - size(1, 1) == size(1, 2) - size(1, 1) > 0


def equals_own_render(member: Member, messages: list[Message]) -> bool | None:
    """Whether the own template renders the same; None where it loses something or rewrites turns of this episode."""
    own = member.template
    try:
        if missing_tool_parts(own.render) or first_break(own.render, messages, SCHEMAS) is not None:
            return None
    except TemplateError:
        return None
    return own.render(messages, SCHEMAS, False) == renderer(member).choice.template.render(messages, SCHEMAS, False)


# The table ----------------------------------------------------------------------------------------------------

_COLUMNS = (
    *("model", "family", "its own template", "used with tools", "tool format"),
    *("rows exact", "calls read", "several calls", "reasoning", "forked", "images"),
)


def table() -> str:
    """The table of docs/models.md."""
    header = f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}\n"
    rows = [*map(_cells, TOOL_USERS), *map(_cells_without_template, NOT_AT_HAND)]
    return header + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(member: Member) -> list[str]:
    family = recognise(member.source)
    used = "its own" if renderer(member).choice.origin is Origin.OWN else f"`{family.training_template}`"
    episodes = [play(member, thought, False) for thought in thoughts(member)]
    several = [play(member, thought, True) for thought in thoughts(member)] if member.parallel else []
    reasoned = [thought for thought in thoughts(member) if thought]
    field = family.format.reasoning.field if reasoned else ""
    kept = _holds(assert_reasoning_kept, play(member, "because", False), field, "because") if reasoned else "none"
    return [
        *(member.name, family.name, _own(member), used, "ours" if family.tools_are_ours else "the model's"),
        _all(_holds(assert_exact, episode) for episode in episodes + several),
        _all(_holds(assert_read, episode) for episode in episodes),
        _all(_holds(assert_read, episode) for episode in several) if several else "one a turn",
        "kept" if kept == "yes" else kept,
        _forked(member),
        _holds(assert_images_shown, member) if member.images else "none",
    ]


def _cells_without_template(name: str) -> list[str]:
    [family] = [family for family in FAMILIES if family.name == name]
    read = [_holds(assert_read_as_written, family.format, CALLS[:count]) for count in (1, 3)]
    return [name, name, "not at hand", "its own, where it is proved", "the model's", "", *read, "", "", "none"]


def _forked(member: Member) -> str:
    try:
        rows = max(rows_when_forked(member, thought) for thought in thoughts(member))
    except TemplateError:
        return "refused"
    return f"{rows} row{'s' * (rows > 1)}"


def _own(member: Member) -> str:
    """What the own template does in tool rounds."""
    problem = renderer(member).choice.problem
    if problem is None:
        return "exact"
    try:
        missing = missing_tool_parts(member.template.render)
    except TemplateError:
        return "shows no tools"
    question = [{"role": "user", "content": "q"}]
    if member.template.render(question, None, True) == member.template.render(question, None, False):
        return "always opens a turn"
    if missing:
        return "shows no tools" if len(missing) > 2 else f"shows no {' and '.join(missing)}"
    return "rewrites turns" if "changes when" in problem else "raises on some rounds"


def _holds(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except AssertionError:
        return "no"
    return "yes"


def _all(answers: Iterable[str]) -> str:
    return "yes" if set(answers) == {"yes"} else "no"


if __name__ == "__main__":
    tables.write(DOCS, BEGIN, END, table())
