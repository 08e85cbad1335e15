"""The project's own files, for the tests that read them."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "goldsmith"


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Every file that git tracks or would track, with one of these suffixes (all files without)."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    paths = (ROOT / name for name in names if name and (not suffixes or name.endswith(suffixes)))
    return tuple(sorted(path for path in paths if path.is_file()))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))
