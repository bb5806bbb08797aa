"""What garbage collections look through while a trainer works, and how often."""

import gc

import pytest

from agentrl.rollout.garbage import YOUNG_OBJECTS, rare_collections
from tests.training.runs import make_trainer


@pytest.mark.parametrize("ends_well", [True, False])
def test_collections_are_rare_and_short_during_training_and_as_before_afterwards(ends_well, tmp_path):
    """Looking through all that the imports left takes 0.2 s, in which no rollout moves."""
    gc.unfreeze()
    before, seen, thresholds = gc.get_threshold(), [], []

    def reward(completions, **kwargs):
        seen.append(gc.get_freeze_count())
        thresholds.append(gc.get_threshold()[0])
        if not ends_well:
            raise ValueError("no reward today")
        return [1.0] * len(completions)

    trainer = make_trainer("grpo", tmp_path, reward=reward)
    if ends_well:
        trainer.train()
    else:
        with pytest.raises(Exception, match="no reward today"):
            trainer.train()
    assert min(seen) > 10_000
    assert gc.get_freeze_count() == 0
    assert set(thresholds) == {YOUNG_OBJECTS}
    assert gc.get_threshold() == before


@pytest.mark.parametrize("young", [0, 1_000_000])
def test_a_threshold_that_is_rarer_still_stays(young):
    before = gc.get_threshold()
    gc.set_threshold(young, *before[1:])
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == young
        assert gc.get_threshold()[0] == young
    finally:
        gc.set_threshold(*before)
