"""Limits are pure, and checked in one order."""

import pytest

from agentrl.rollout.limits import Limits, Progress, binding_limit, reached, room
from agentrl.types import Limit

EVERYTHING = {"cancelled": True, "seconds": 9.0}
LIMITS = Limits(max_completion_length=4, max_context=8, max_tool_iterations=1, rollout_timeout=5.0)


def test_the_order_is_that_of_the_enum():
    """Invariant 8: with all limits reached, taking the first away shows the next one."""
    progress = Progress(prompt_length=4, completion_length=4, tool_iterations=1, **EVERYTHING)
    seen = [reached(LIMITS, progress, wants_tools=True)]
    for field, value in (("cancelled", False), ("seconds", 0.0), ("prompt_length", 0), ("completion_length", 0)):
        progress = Progress(
            **{name: getattr(progress, name) for name in Progress.__dataclass_fields__} | {field: value}
        )
        seen.append(reached(LIMITS, progress, wants_tools=True))
    assert seen == list(Limit)


def test_tool_iterations_only_count_before_a_tool_round():
    progress = Progress(prompt_length=1, completion_length=1, tool_iterations=1)
    assert reached(LIMITS, progress) is None
    assert reached(LIMITS, progress, wants_tools=True) is Limit.TOOL_ITERATIONS


@pytest.mark.parametrize(("iterations", "limit"), [(0, Limit.TOOL_ITERATIONS), (None, None)])
def test_zero_iterations_is_not_unlimited_E08(iterations, limit):
    limits = Limits(max_tool_iterations=iterations)
    assert reached(limits, Progress(1, 1), wants_tools=True) is limit


@pytest.mark.parametrize(("prompt", "expected"), [(14, 2), (16, 0), (5, 8)])
def test_a_turn_gets_the_room_that_is_left_E07(prompt, expected):
    limits = Limits(max_completion_length=8, max_context=16)
    assert room(limits, Progress(prompt, 0)) == expected


def test_room_is_unbounded_without_limits():
    assert room(Limits(), Progress(10**6, 10**6)) is None


def test_the_binding_limit_is_named():
    assert binding_limit(Limits(max_completion_length=8, max_context=16), Progress(8, 8)) is Limit.CONTEXT
    assert binding_limit(Limits(max_completion_length=8, max_context=99), Progress(8, 8)) is Limit.COMPLETION
