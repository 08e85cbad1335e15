"""Bubblewrap (`bwrap`) around the processes of candidates, for systems that let only such a program make namespaces.

Inside there is no network, a read-only file system and an empty /tmp. Where the system allows it, each candidate also
gets namespaces of its own, as without bubblewrap.
"""

from __future__ import annotations

import shutil
import subprocess

from . import zygote_process

ARGUMENTS = (
    "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm",
    "--unshare-net", "--unshare-ipc", "--die-with-parent",
)  # fmt: skip


def missing() -> str:
    """Why bubblewrap cannot be used here, or ""."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed here; its package is usually called bubblewrap"
    done = subprocess.run([program, *ARGUMENTS, "true"], capture_output=True, text=True)
    return f"bubblewrap cannot run here: {done.stderr.strip()[:300]}" if done.returncode else ""


def use() -> None:
    """Start this process's next zygote inside of bubblewrap."""
    zygote_process.PREFIX[:] = [shutil.which("bwrap") or "bwrap", *ARGUMENTS]
