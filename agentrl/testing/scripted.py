"""A generator that plays back a script instead of running a model, and records what it was asked.

For exact tests of everything above generation: the ids are known, so is the row that must come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.types import FinishReason, Sample

Policy = Callable[[str, list[int], SamplingParams], "Sample | list[int]"]


@dataclass(frozen=True, slots=True)
class SampleCall:
    """What one call of `sample` was given, and what it returned."""

    session: str
    ids: list[int]
    params: SamplingParams
    sample: Sample


class ScriptedGenerator:
    """Plays back turns.

    Args:
        script: One list of turns for each session, in the order in which sessions first ask; or a function
            `(session, ids, params) -> turn`. A turn is a `Sample` or a list of ids, whose logprobs are then
            unknown (NaN) and which counts as cut by length when it does not end in a stop id.
        max_context: Reported as the context length.

    Raises:
        AssertionError: A session asks once too often, or more sessions come than were scripted.
    """

    def __init__(
        self, script: Sequence[Sequence[Sample | list[int]]] | Policy, *, max_context: int | None = None
    ) -> None:
        self._script = script
        self._max_context = max_context
        self._scripts: dict[str, list[Sample | list[int]]] = {}
        self.calls: list[SampleCall] = []
        self.released: list[str] = []
        self.weights_version = 0
        self.stats = GenerationStats()

    @property
    def owns_weights(self) -> bool:
        """A script does not depend on weights."""
        return True

    @property
    def max_context(self) -> int | None:
        """The context length given at construction."""
        return self._max_context

    async def sample(self, session: str, ids: Sequence[int], params: SamplingParams) -> Sample:
        """Return the session's next scripted turn."""
        given = list(ids)
        turn = self._script(session, given, params) if callable(self._script) else self._next(session)
        if not isinstance(turn, Sample):
            stopped = bool(turn) and turn[-1] in params.stop_ids
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            turn = Sample(list(turn), [math.nan] * len(turn), finish, self.weights_version)
        self.calls.append(SampleCall(session, given, params, turn))
        self.stats.decoded_tokens += len(turn.ids)
        return turn

    def calls_of(self, session: str) -> list[SampleCall]:
        """The calls of one session, in order."""
        return [call for call in self.calls if call.session == session]

    def sessions(self) -> list[str]:
        """Names of the sessions in the order in which they first asked."""
        return list(dict.fromkeys(call.session for call in self.calls))

    def release(self, session: str) -> None:
        """Record the release."""
        self.released.append(session)

    def sync(self, weights_version: int) -> None:
        """Record the version."""
        self.weights_version = weights_version

    def close(self) -> None:
        """Nothing to free."""

    def _next(self, session: str) -> Sample | list[int]:
        assert not callable(self._script)
        if session not in self._scripts:
            index = len(self._scripts)
            assert index < len(self._script), f"session {session} is number {index + 1}; {index} are scripted"
            self._scripts[session] = list(self._script[index])
        assert self._scripts[session], f"session {session} asked for more turns than are scripted"
        return self._scripts[session].pop(0)
