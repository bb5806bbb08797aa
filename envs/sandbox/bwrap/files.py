"""Files into and out of a sandbox, by a process that is inside and has no privilege that a command has not."""

from __future__ import annotations

import os
import sys
import tarfile

MISSING, FAILED = 44, 45
"""Exit codes: there is no such file; something else, which stderr tells."""


def put(folder: str) -> int:
    """Extract the tar at stdin in a folder."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            archive.extraction_filter = lambda member, folder: member  # it comes from outside
            archive.extractall(folder, numeric_owner=True)
    except (OSError, tarfile.TarError) as error:
        return _failed(error)
    return 0


def get(path: str) -> int:
    """Write a tar of a file or folder to stdout."""
    try:
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            archive.add(path.rstrip("/") or "/", os.path.basename(path.rstrip("/")) or "root")
        sys.stdout.buffer.flush()
    except FileNotFoundError:
        return MISSING
    except (OSError, tarfile.TarError) as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    os.write(2, str(error).encode(errors="replace"))
    return FAILED
