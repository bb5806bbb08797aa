"""When the engine in the process gives its memory up and takes it back: what vLLM's engine is asked, in which order."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.lockstep import Lockstep
from agentrl.generation.vllm_colocate import _Core
from agentrl.generation.weights import PolicyWeights
from agentrl.testing.models import tiny_model


class Engine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def asked(*args: Any, **keywords: Any) -> None:
            what = [*args, *(tuple(value) if isinstance(value, list) else value for value in keywords.values())]
            self.asked.append((name, *([] if name == "collective_rpc" else what)))

        return asked


@pytest.fixture
def core():
    engine = Engine()
    made = _Core(engine, PolicyWeights(tiny_model("qwen3")), Lockstep(1), {}, None, GenerationStats())
    made.update()
    made.renew(3)
    engine.asked.clear()
    return made, engine


RENEWED = [("set_weight_version", "3"), ("reset_prefix_cache", True)]
WOKEN = [("wake_up", ("weights",)), ("collective_rpc",), ("wake_up", ("kv_cache",))]


def test_the_engine_sleeps_while_the_policy_is_trained_and_gets_its_weights_before_the_next_turn(core):
    """Level 2 throws weights and cache away, so they are loaded again, into memory that is woken first."""
    core, engine = core
    core.wake()
    assert engine.asked == []
    core.rest(sleeps=True)
    core.rest(sleeps=True)
    assert engine.asked == [("sleep", 2)]
    engine.asked.clear()
    core.wake()
    assert engine.asked == [*WOKEN, *RENEWED], "the policy has not changed, and vLLM has forgotten it"
    engine.asked.clear()
    core.rest(sleeps=True)
    core.update()
    core.renew(3)
    core.wake()
    assert engine.asked == [("sleep", 2), *WOKEN, *RENEWED], "new weights are loaded once"


def test_the_engine_stays_awake_without_sleep_mode_and_with_turns_in_flight(core):
    core, engine = core
    core.rest(sleeps=False)
    core.wake()
    core.submit("s", [5, 6], SamplingParams(max_tokens=1), lambda answer: None)
    core.rest(sleeps=True)
    assert engine.asked == []
