"""Diagnoses the kernels of examples/gallery, and writes what was printed into docs/gallery.md.

    python scripts/gallery.py [NAME ...]       without a name all of them, one after another: ten minutes

Fills the blocks of commands that are marked as made by this script, shortened, and the table, which has a row for each
kernel. The column "patch" compares the patched file with the right version, which fixes.toml gives.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from goldsmith.core.json_values import parse_json

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
FIXES = tomllib.loads((FOLDER / "fixes.toml").read_text(encoding="utf-8"))
BUDGET = "180"  # seconds
MARK = r"<!-- test: not run, made by scripts/gallery\.py -->\n"
COMMAND = rf"goldsmith diagnose examples/gallery/(\w+)\.py --budget {BUDGET}"
BLOCK = re.compile(rf"({MARK}```console\n\$ {COMMAND}\n)(.*?)(```\n)", re.S)
TABLE = re.compile(r"(<!-- made by scripts/gallery\.py -->\n)(.*?)(<!-- end -->)", re.S)
HEAD = ("kernel", "first cause", "line", "patch", "seconds")
KEPT = ("FAIL", "Why", "Facts", "Line", "Patch", "No patch")  # parts of a report that the page shows


def right(name: str) -> str:
    """The text of a kernel's right version."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for old, new in FIXES[name].items():
        if old not in text:
            raise SystemExit(f"{name}.py does not hold {old!r}")
        text = text.replace(old, new)
    return text


def wrong_lines(name: str) -> set[int]:
    """The numbers of the lines in which the two versions differ."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    pairs = zip(text.splitlines(), right(name).splitlines(), strict=True)
    return {number for number, (old, new) in enumerate(pairs, 1) if old != new}


def shortened(output: str) -> str:
    """The parts of KEPT, with `...` for the others."""
    lines: list[str] = []
    for part in output.strip().split("\n\n"):
        if part.startswith(KEPT):
            lines += ["", *part.splitlines()]
        elif lines[-1] != "...":
            lines += ["..."]
    return "\n".join(lines).strip() + "\n"


def row(name: str, report: dict, copy: Path, seconds: str) -> str:
    """One row of the table."""
    cause = report["causes"][0]
    line = report["line"]
    place = "none"
    if line is not None:
        apart = min(abs(line["line"] - number) for number in wrong_lines(name))
        place = "the faulty one" if apart == 0 else f"{apart} lines from it" if apart > 1 else "next to it"
    patch = "none"
    if copy.exists():
        same = copy.read_text(encoding="utf-8") == right(name)
        patch = "the right version, word for word" if same else "in other words"
    words = ("not explained; likely " if "not explained" in report["headline"] else "") + f"`{cause['id']}`"
    return f"| [`{name}`](../examples/gallery/{name}.py) | {words} | {place} | {patch} | {seconds} |"


def diagnosed(name: str) -> tuple[str, str]:
    """(what `goldsmith diagnose` printed, the kernel's row)."""
    with tempfile.TemporaryDirectory() as folder:
        data, copy = Path(folder, "report.json"), Path(folder, "patched.py")
        command = [sys.executable, "-m", "goldsmith", "diagnose", f"examples/gallery/{name}.py", "--budget", BUDGET]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [*command, "--interpret", "--json", str(data), "--apply", str(copy)],
            capture_output=True, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        if done.returncode != 1:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-600:]}")
        seconds = re.search(r"^(\d+)\.\d\d s", done.stdout, re.M)[1]
        return done.stdout, row(name, parse_json(data.read_text(encoding="utf-8")), copy, seconds)


def known_rows(page: str) -> dict[str, str]:
    """The rows of the page's table by kernel."""
    lines = TABLE.search(page)[2].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| [`")}


def counts(rows: list[str]) -> str:
    """How many of the kernels have a patch and the line."""
    cells = [row.split(" | ") for row in rows]
    patches, lines = [c[3] for c in cells if c[3] != "none"], [c[2] for c in cells if c[2] != "none"]
    same = sum("word for word" in patch for patch in patches)
    return (
        f"Patches: {len(patches)} of {len(rows)} (word for word the right version: {same})."
        f" Lines: {len(lines)} of {len(rows)} (the faulty one: {lines.count('the faulty one')}).\n"
    )


def filled(page: str, name: str, output: str, line: str) -> str:
    """The page with what came of one kernel."""
    page = BLOCK.sub(lambda m: m[1] + shortened(output) + m[4] if m[2] == name else m[0], page)
    known = known_rows(page) | {name: line}
    rows = [known[kernel] for kernel in FIXES if kernel in known]
    head = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    table = "\n".join([*head, *rows, "", counts(rows)])
    return TABLE.sub(lambda m: f"{m[1]}{table}{m[3]}", page)


def main(names: list[str]) -> int:
    for name in names or list(FIXES):
        output, line = diagnosed(name)
        print(f"{output}\n{line}", flush=True)
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), name, output, line), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
