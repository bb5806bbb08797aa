"""vLLM's engine in the process: what it is asked when it gives its memory up, and what it may not do to the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.lockstep import Lockstep
from agentrl.generation.vllm_colocate import _Core, changed_for_vllm_alone
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


class Double(torch.nn.Module):
    """A model's class, which vLLM changes in place."""

    def __init__(self, config: str) -> None:
        super().__init__()
        self.config = config

    def forward(self, value: int) -> int:
        return 2 * value


def test_what_vllm_does_to_the_class_of_the_model_is_not_done_to_the_policy():
    """As with `vllm_model_impl="transformers"`: instances want vLLM's configuration, and calls what only they have."""
    policy = Double("policy")
    with changed_for_vllm_alone(torch.nn.Sequential(policy)):
        theirs_init = Double.__init__

        def compiled_init(self: Any, *args: Any, vllm_config: str) -> None:
            theirs_init(self, *args)
            self.do_not_compile = True

        def compiled_call(self: Any, *args: Any) -> Any:
            return ("compiled", self.do_not_compile, self.forward(*args))

        Double.__init__, Double.__call__ = compiled_init, compiled_call
        engine = Double("engine", vllm_config="vLLM's")
    assert engine(3) == ("compiled", True, 6)
    assert policy(3) == 6
    policy.register_forward_hook(lambda *_: 7)
    assert policy(3) == 7, "hooks are called as of any module"
    assert Double("the reference policy")(3) == 6
