"""Atomic writing: a file appears at its path whole or not at all, and leftovers of killed writers are removed.

The writer creates a temporary file in the same folder, syncs it, and renames it. It holds a lock on the file, which the
system drops when the process dies. The next writer to the same path removes temporary files that nobody locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

BUILDING = ".building"  # suffix of the temporary name
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)  # errors of a file system without locks


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A new file to write to: renamed to `path` when the block succeeds, deleted when it raises."""
    remove_leftovers(path)
    file, name = _create(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)  # rename while still locked, so that no other writer takes it for a leftover
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
        raise
    _sync(path.parent)


def remove_leftovers(path: Path) -> list[Path]:
    """Removes temporary files of `path` whose owners are dead; returns them."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}" + re.escape(BUILDING))
    removed = []
    for left in list(path.parent.iterdir()):
        if pattern.fullmatch(left.name) and _abandoned(left):
            removed.append(left)
    return removed


def _create(path: Path) -> tuple[IO[bytes], Path]:
    while True:
        name = path.parent / f".{path.name}.{secrets.token_hex(8)}{BUILDING}"
        file = open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "w+b")
        try:
            if not _lock(file, wait=True) or _is(file, name):
                return file, name
        except BaseException as error:
            file.close()
            name.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, os.fspath(name)) from error
            raise
        file.close()  # another writer took it for a leftover before we locked it, and removed it


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Whether we hold the lock now. Raises BlockingIOError when another process holds it and wait=False."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _abandoned(left: Path) -> bool:
    """Deletes the file if no process locks it; returns whether it did."""
    try:
        with open(left, "rb") as file:
            if not _lock(file, wait=False) or not _is(file, left):
                return False
            left.unlink()
            return True
    except OSError:  # the file has an owner, belongs to another user, or is already gone
        return False


def _is(file: IO[bytes], name: Path) -> bool:
    """Whether the open file is still the file at `name`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    return False


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
