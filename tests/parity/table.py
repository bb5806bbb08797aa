"""Print how far training here and in TRL are apart, case by case: `make bench-parity`.

    python -m tests.parity.table [WORD ...]

Only the cases whose name contains one of the words; without any, all. Exit code 1 when a case differs by 1e-5 or more.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import trl
from transformers.utils import logging

from tests.parity.cases import CASES
from tests.parity.harness import difference, run

LIMIT = 1e-5


def main(words: list[str]) -> int:
    """Compare and print."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{f'TRL {trl.__version__}':40} {'weights':>9} {'moved':>9} {'logs':>9}  metric that differs most")
    worst = 0.0
    for case in CASES:
        if words and not any(word in case.name for word in words):
            continue
        with contextlib.redirect_stdout(io.StringIO()):  # the trainers print their logs
            found = difference(case, run("agentrl", case), run("trl", case))
        name, apart = found.worst
        print(f"{case.name:40} {found.weights:9.0e} {found.moved:9.0e} {apart:9.0e}  {name}", flush=True)
        worst = max(worst, found.weights, apart)
    print(f"\nlargest difference: {worst:.0e}, {'within' if worst < LIMIT else 'ABOVE'} {LIMIT:.0e}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
