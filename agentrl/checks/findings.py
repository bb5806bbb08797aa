"""What a check says: how it went, what was seen, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check went."""

    PASS = "pass"
    WARN = "warn"
    """Training works, and is likely not to do what is wanted."""
    FAIL = "fail"
    """Training stops, or learns something else."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check.
        status: How it went.
        seen: What was seen.
        advice: What to do about it; "" where there is nothing to do.
    """

    check: str
    status: Status
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.status.value}  {self.check:<12} {self.seen}" + (
            f"\n      -> {self.advice}" if self.advice else ""
        )


def passed(check: str, seen: str) -> Finding:
    """A check that went well."""
    return Finding(check, Status.PASS, seen)


def warned(check: str, seen: str, advice: str) -> Finding:
    """Something that is likely not wanted."""
    return Finding(check, Status.WARN, seen, advice)


def failed(check: str, seen: str, advice: str) -> Finding:
    """Something that cannot be trained with."""
    return Finding(check, Status.FAIL, seen, advice)
