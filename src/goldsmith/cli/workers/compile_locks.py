"""A Triton kernel that several workers need is compiled by one of them; the others wait and read it from the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOCKS = "goldsmith.locks"  # a file in Triton's cache; each kernel locks one of its bytes, which need not exist
BYTES = 1 << 62


def share_compiles() -> None:
    """From now on, this process compiles no kernel while another process that called this function compiles it."""
    import triton

    if not isinstance(triton.compiler.compile, SharedCompiler):
        triton.compiler.compile = SharedCompiler(triton.compiler.compile, Path(triton.knobs.cache.dir) / LOCKS)


class SharedCompiler:
    """Triton's `compile`, with a lock for each kernel. A process that waited finds the kernel in Triton's cache."""

    def __init__(self, compile_kernel: Callable[..., Any], path: Path) -> None:
        self.compile_kernel, self.path = compile_kernel, path

    def __call__(self, src: Any, target: Any = None, options: dict[str, Any] | None = None, **further: Any) -> Any:
        with locked(self.path, f"{src.hash()} {sorted((options or {}).items(), key=lambda item: item[0])}"):
            return self.compile_kernel(src, target=target, options=options, **further)


@contextlib.contextmanager
def locked(path: Path, key: str) -> Iterator[None]:
    """Holds a key's lock in a file against other processes; goes on without it if the file cannot be locked."""
    at = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % BYTES
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that is read-only, a file system without locks
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, descriptor)
            fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, at)
        yield
