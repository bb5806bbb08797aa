"""Examples are scripts beside the package: their folder goes on the path, as when one of them is run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
