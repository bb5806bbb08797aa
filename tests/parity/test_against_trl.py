"""Training here and in TRL on the same rollouts gives the same weights and the same logs."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="the peer; in the extra bench")

from tests.parity.cases import CASES
from tests.parity.harness import Case, Trained, difference, run
from tests.training.runs import distance

SAME = 1e-5
ALWAYS = {"grpo", "dapo", "sequence level", "beta, bias correction", "sequence_mask", "rloo beta"}
"""Cases of the fast tests."""


def cases(*, effect: bool = False) -> list[object]:
    """The cases; for a test of what an option changes, those that have one."""
    chosen = [case for case in CASES if not effect or case.without != case]
    slow = pytest.mark.slow
    return [
        pytest.param(case, id=case.name, marks=[slow] if effect or case.name not in ALWAYS else []) for case in chosen
    ]


def test_names_tell_cases_apart():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= ALWAYS


@pytest.mark.parametrize("case", cases())
def test_trains_as_trl_does(case: Case):
    """J, K, L: weights after training, and every metric that TRL logs, the same at each step."""
    theirs = run("trl", case)
    found = difference(case, run("agentrl", case), theirs)
    assert found.moved > 100 * SAME
    assert found.weights < SAME
    assert {name: apart for name, apart in found.logs.items() if apart > SAME} == {}
    assert not found.missing
    assert found.logs.keys() | case.apart >= {"loss", "grad_norm", "entropy", "reward", "reward_std"}


@pytest.mark.parametrize("case", cases(effect=True))
def test_what_a_case_is_about_changes_the_weights(case: Case):
    """Otherwise the other test would hold for an option that both sides ignore."""
    assert distance(run("agentrl", case).weights, _without(case).weights) > 100 * SAME


_RUNS: dict[str, Trained] = {}


def _without(case: Case) -> Trained:
    """The run that a case must not equal; many cases share it."""
    plain = case.without
    key = repr((plain.algorithm, sorted(plain.options.items()), plain.rollouts, plain.rewards, plain.family))
    if key not in _RUNS:
        _RUNS[key] = run("agentrl", plain)
    return _RUNS[key]
