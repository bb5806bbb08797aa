"""Root filesystems for local sandboxes: a folder as it is, or a tar file, extracted once into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from agentrl.envs.sandbox.archive import need_filters
from agentrl.envs.sandbox.bwrap.jail import FIRST_UID, UIDS
from agentrl.errors import ConfigurationError


def extracted(rootfs: Path) -> Path:
    """The folder that holds a root filesystem.

    Files of a tar belong to the users that it names, as they are inside of a sandbox; where root does not start
    sandboxes, all belong to root. Devices are left out. Files of a folder keep their owners, whom a sandbox sees as
    "nobody" unless it runs as the same user.

    Raises:
        ConfigurationError: The tar cannot be read.
    """
    rootfs = rootfs.resolve(strict=True)
    if rootfs.is_dir():
        return rootfs
    need_filters()
    state = rootfs.stat()
    key = hashlib.sha256(f"{rootfs} {state.st_size} {state.st_mtime_ns} {os.geteuid()}".encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "agentrl", "rootfs")
    folder = cache / key
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=cache, suffix=".part"))
    try:
        with tarfile.open(rootfs) as archive:
            archive.extractall(part, numeric_owner=True, filter=_shifted)
        part.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(part, FIRST_UID, FIRST_UID)
        part.rename(folder)
    except (tarfile.TarError, EOFError) as error:
        raise ConfigurationError(f"the rootfs {rootfs} cannot be extracted: {error}") from error
    except OSError:
        if not folder.is_dir():  # else another process was quicker
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _shifted(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    safe = tarfile.tar_filter(member, folder)
    if not (safe.isreg() or safe.isdir() or safe.issym() or safe.islnk()):
        return None
    if os.geteuid() != 0:
        return safe
    return safe.replace(
        uid=FIRST_UID + min(safe.uid or 0, UIDS - 1), gid=FIRST_UID + min(safe.gid or 0, UIDS - 1), deep=False
    )
