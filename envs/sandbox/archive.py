"""Files on their way into and out of a sandbox, as tar streams. What comes out is not trusted."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from agentrl.errors import ConfigurationError


def pack(source: Path | bytes, name: str, tar: IO[bytes], owner: tuple[int, int]) -> None:
    """Write a file's content, or a file or folder here, into a tar under a name, owned by a user and a group.

    Symbolic links are not followed, but for `source` itself; devices, pipes and sockets are left out.
    """

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return _owned(member, owner) if member.isreg() or member.isdir() or member.issym() else None

    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if isinstance(source, bytes):
            member = tarfile.TarInfo(name)
            member.size = len(source)
            archive.addfile(_owned(member, owner), io.BytesIO(source))
        else:
            archive.add(os.path.realpath(source, strict=True), name, filter=owned)


def folders(names: Sequence[str], owner: tuple[int, int]) -> bytes:
    """A tar of empty folders."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(_owned(member, owner))
    return tar.getvalue()


def read_file(tar: IO[bytes], path: str, max_bytes: int) -> bytes:
    """The content of the one file in a tar.

    Raises:
        IsADirectoryError: It holds a folder.
        ValueError: It holds something else, says to be larger than `max_bytes` (sparse files do), or is damaged.
    """
    try:
        with tarfile.open(fileobj=tar) as archive:
            member = archive.next()
            if member is not None and member.isdir():
                raise IsADirectoryError(f"{path} is a folder; use get_folder")
            if member is None or not member.isreg():
                raise ValueError(f"{path} is not a regular file")
            _check_size(member.size, max_bytes, path)
            content = archive.extractfile(member)
            assert content is not None
            return content.read()
    except tarfile.TarError as error:
        raise ValueError(f"{path} arrived damaged: {error}") from error


def unpack(tar: IO[bytes], target: Path, path: str, max_bytes: int) -> list[str]:
    """Extract the folder in a tar as `target`; gives names of what was left out because it is not safe.

    Python's `data` filter decides: nothing outside of `target`, no links out of it, no devices, no owners, no set-id.

    Raises:
        NotADirectoryError: The tar holds a file.
        ValueError: It is damaged, or its files say to be larger than `max_bytes` together.
        OSError: It cannot be written here.
    """
    need_filters()
    left_out: list[str] = []
    top: str | None = None
    size = 0

    def safe(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        nonlocal top, size
        size += member.size
        _check_size(size, max_bytes, path)
        if top is None:
            if not member.isdir():
                raise NotADirectoryError(f"{path} is not a folder")
            top = member.name.rstrip("/")
        names = {"name": member.name.removeprefix(top).lstrip("/") or "."}
        if member.islnk():
            names["linkname"] = member.linkname.removeprefix(top).lstrip("/")
        try:
            return tarfile.data_filter(member.replace(**names, deep=False), folder)  # type: ignore[arg-type]
        except tarfile.FilterError:
            left_out.append(names["name"])
            return None

    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=tar) as archive:
            archive.extractall(target, filter=safe)
    except (tarfile.TarError, KeyError) as error:  # a KeyError: a hard link to what is not in it
        raise ValueError(f"{path} arrived damaged: {error}") from error
    return left_out


def need_filters() -> None:
    """Refuse a Python whose `tarfile` cannot tell safe members of an archive.

    Raises:
        ConfigurationError: It is older than 3.11.4.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ConfigurationError("extracting archives safely needs Python 3.11.4 or newer")


def _check_size(size: int, max_bytes: int, path: str) -> None:
    if size > max_bytes:
        raise ValueError(f"{path} has more than max_bytes={max_bytes} bytes")


def _owned(member: tarfile.TarInfo, owner: tuple[int, int]) -> tarfile.TarInfo:
    member.uid, member.gid = owner
    member.uname = member.gname = ""
    return member
