"""A file that appears whole or not at all, and whose leftovers vanish.

It is written under a name of its own in the same folder, synced, and renamed. While its owner lives, the owner holds a
lock on it, which the system drops when the process dies, however it dies: whoever next writes the same path removes
what nobody holds.
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

BUILDING = ".building"  # how the name ends until it is the file's own
_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)  # a file system that has none


@contextlib.contextmanager
def published(path: Path) -> Iterator[IO[bytes]]:
    """A new file for writing; at `path` when the block ends well, gone when it does not."""
    remove_leftovers(path)
    file, name = _create(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)  # while it is locked still: nobody takes it for a leftover
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
        raise
    _sync(path.parent)


def remove_leftovers(path: Path) -> list[Path]:
    """Removes temporary files of `path` whose owners are dead; returns them."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}" + re.escape(BUILDING))
    gone = []
    for left in list(path.parent.iterdir()):
        if pattern.fullmatch(left.name) and _abandoned(left):
            gone.append(left)
    return gone


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
        file.close()  # somebody took it for a leftover before it was locked, and removed it


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Whether the file is locked by us now; BlockingIOError if it is by another and we do not wait."""
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
    """Whether nobody held this file; then it is gone."""
    try:
        with open(left, "rb") as file:
            if not _lock(file, wait=False) or not _is(file, left):
                return False
            left.unlink()
            return True
    except OSError:  # it has an owner, belongs to somebody else, or is gone already
        return False


def _is(file: IO[bytes], name: Path) -> bool:
    """Whether the open file is what the name leads to."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    return False


def _sync(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a file system that cannot sync a folder has nothing more to offer
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
