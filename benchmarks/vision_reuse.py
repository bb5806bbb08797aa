"""What reuse saves an agent that sees: the grid world of examples/grid_world.py, trained with and without it.

The same agent is trained from the same weights with the local generator (keys and values kept between turns,
features kept by picture) and with `model.generate` (features alone). Printed are the mean reward of the first and the
last tenth of the steps, CPU seconds of the whole training, images encoded by the generator, and different images,
summed over the windows between two changes of the weights. Exits with 1 if one of them encodes more than 1.05 for each
of these.

    python benchmarks/vision_reuse.py [--steps 60] [--imitation 200 60] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import grid_world

from agentrl.generation.local import LocalGenerator
from agentrl.generation.plain import PlainGenerator

LIMIT = 1.05


class _Counting:
    """A generator that counts the different images that it is shown between two changes of the weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seen: set[str] = set()
        self._counted = 0

    @property
    def different_images(self) -> int:
        return self._counted + len(self._seen)

    async def sample(self, session: str, ids: Any, params: Any, images: Any = ()) -> Any:
        self._seen |= {span.image.digest for span in images}
        return await super().sample(session, ids, params, images)  # type: ignore[misc]

    def sync(self, weights_version: int) -> None:
        self._counted, self._seen = self.different_images, set()
        super().sync(weights_version)  # type: ignore[misc]


class Local(_Counting, LocalGenerator): ...


class Plain(_Counting, PlainGenerator): ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--imitation", type=int, nargs=2, default=(200, 60))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.imitation, grid_world.EPISODES = 1, (2, 2), 16
    agent, processor = grid_world.make_agent(good=options.imitation[0], careless=options.imitation[1])
    print("generator   reward first, last 10%   CPU s   encoded   different   ratio   tokens prefilled")
    ratios = []
    for kind in (Local, Plain):
        with tempfile.TemporaryDirectory() as folder:
            start = time.process_time()
            trainer = grid_world.train(copy.deepcopy(agent), processor, steps=options.steps, out=folder, generator=kind)
            seconds = time.process_time() - start
        generator: Any = trainer.collector.generator
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        tenth = max(1, len(rewards) // 10)
        first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
        encoded, different = generator.stats.images_encoded, generator.different_images
        ratios.append(encoded / different)
        print(
            f"{kind.__name__.lower():11} {first:12.2f}, {last:.2f} {seconds:13.1f} {encoded:9} {different:11} "
            f"{ratios[-1]:7.2f} {generator.stats.prefilled_tokens:18}"
        )
    sys.exit(max(ratios) > LIMIT)


if __name__ == "__main__":
    main()
