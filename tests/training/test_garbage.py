"""What garbage collections look through while a trainer works."""

import gc

import pytest

from tests.training.runs import make_trainer


@pytest.mark.parametrize("ends_well", [True, False])
def test_earlier_objects_are_set_aside_during_training_and_taken_back(ends_well, tmp_path):
    """Looking through all that the imports left takes 0.2 s, in which no rollout moves."""
    gc.unfreeze()
    seen = []

    def reward(completions, **kwargs):
        seen.append(gc.get_freeze_count())
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
