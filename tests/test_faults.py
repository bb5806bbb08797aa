"""Every fault that people reported of systems like this has a test, which carries its id in its name or docstring.

Kinds: A masks, B prefixes, C templates, D calls, E lengths, F tools, G environments, H rewards, I losses, J logprobs,
K processes, L data and resuming, M images, N tokenizers and models. `python -m tests.test_faults` lists the tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FAULTS = """
A01 A02 A03 A04 A05 A06 A07 A08 A09 A10
B01 B02 B03 B04 B05 B06 B07 B09
C02 C03 C04 C05 C06 C07 C08
D01 D03 D04 D05 D06 D07 D08 D09 D10 D11 D12 D13 D14 D15 D16
E01 E02 E04 E05 E06 E07 E08 E09
F01 F02 F03 F04 F05 F06 F07 F08 F09 F10 F11 F13
G01 G03 G04 G05 G06 G08 G09 G10 G11 G12 G13 G14 G15
H01 H02 H03 H04 H05 H06 H07 H08 H10 H11 H12 H13 H14 H15 H16
I02 I03 I04 I05 I06 I07 I08 I09 I10
J02 J03 J04
K02 K03 K04
L01 L03 L04 L05 L06 L07 L08 L09 L10
M01 M02 M04 M05
N01 N03 N04 N05 N06 N07
"""


def coverage() -> dict[str, list[str]]:
    """The tests of each fault, by file and name."""
    tests: dict[str, list[str]] = {fault: [] for fault in FAULTS.split()}
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                told = f"{node.name.upper().replace('_', ' ')} {ast.get_docstring(node)}"
                for fault in set(re.findall(r"\b[A-N]\d\d\b", told)) & tests.keys():
                    tests[fault].append(f"{path.relative_to(folder)}::{node.name}")
    return tests


def test_every_fault_has_a_test():
    missing = [fault for fault, tests in coverage().items() if not tests]
    assert not missing, f"no test carries {', '.join(missing)}"


if __name__ == "__main__":
    for fault, tests in coverage().items():
        print(fault, *tests, sep="\n    ")
