"""A folder for temporary files that goes away with this process, even if the process is killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from goldsmith.cli.terminal import Failure

# waits for the end of its stdin, which comes when the other process has ended, however it ended
REMOVE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@contextlib.contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A new folder in `parent` (the system's folder for temporary files by default), removed at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="goldsmith-bench-", dir=parent))
    except OSError as error:
        raise Failure(f"--folder {parent}: no folder can be made there: {error.strerror or error}.") from error
    remover = subprocess.Popen(
        [sys.executable, "-S", "-c", REMOVE, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if remover.stdin is not None:
            remover.stdin.close()
        remover.wait()
