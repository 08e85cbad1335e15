"""Runs a document: every code block that a reader sees, in order, in an empty folder but for the project's examples/.

    python tests/repo/markdown.py docs/README.md [--gpu] [--update]

```python           runs; the blocks of a document share their names; one with `title=kernels.py` is saved under this
                    name and imported instead, for later blocks to import from.
```console          lines that begin with `$ ` run in bash; what follows them must be what they print: on standard
                    output, or, where nothing comes there, on standard error (progress goes there, and is not shown).
```text             right after a python block: what that block must print. Elsewhere: only text.
```json, toml       must parse.

A block inside an HTML comment that begins with `<!-- picture` is tested like any other. A reader sees only the
picture of it that scripts/site/pictures.py draws.

In expected output, `...` stands for anything within a line and, alone on a line, for any number of lines; runs of
spaces count as one. A comment on the line above a block changes how it is tested:

<!-- test: numbers vary -->      compares words; every number may be another one, and so may line breaks
<!-- test: numbers vary by 2 % -->    no number may differ by more: for results that only rounding changes
<!-- test: exit 1 -->            the commands of this block end with this status
<!-- test: needs gpu -->         is skipped where there is none
<!-- test: shown without a gpu -->    is skipped where there is one
<!-- test: needs package NAME -->     is skipped where it is not installed
<!-- test: not run, REASON -->   is not run, for a good reason: "it is what make did before this test"

With --update, blocks of commands whose numbers vary, and that hold no `...`, get what came as their text.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
DIRECTIVE = re.compile(r"^\s*<!-- test: (?P<text>.*?) -->\s*$")
LANGUAGES = ("python", "console", "text", "json", "toml")
VARY = re.compile(r"numbers vary(?: by (?P<percent>[\d.]+) %)?")
NUMBER = re.compile(r"(?:\d+ min )?[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
SECONDS = 300
ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("examples", "benchmarks")  # folders of the checkout that a reader's commands use


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str
    text: str
    directives: tuple[str, ...]
    pictured: bool = False  # hidden in a comment; a picture shows it


class Failure(Exception):
    """What is wrong with a document, in words."""


def blocks(text: str) -> list[Block]:
    items: list[Block] = []
    directives: list[str] = []
    lines = text.splitlines()
    at, pictured = 0, False
    while at < len(lines):
        line = lines[at]
        fence, directive = FENCE.match(line), DIRECTIVE.match(line)
        if directive:
            directives.append(directive["text"])
        elif fence:
            first, indent = at + 1, len(fence["indent"])
            at += 1
            while at < len(lines) and lines[at].strip() != "```":
                at += 1
            body = "".join(inner[indent:] + "\n" for inner in lines[first:at])
            language, _, rest = fence["info"].strip().partition(" ")
            title = rest.removeprefix("title=") if rest.startswith("title=") else ""
            items.append(Block(first, language, title, body, tuple(directives), pictured))
            directives = []
        elif line.strip():
            directives = []
            pictured = line.startswith("<!-- picture") or (pictured and line != "-->")
        at += 1
    return items


def agrees(expected: str, got: str, *, percent: float = 0.0) -> bool:
    """Whether `got` is what `expected` shows, with its elisions; each number within `percent` of the one shown."""
    numbers_vary = percent == math.inf

    def plain(text: str) -> list[str]:
        rows = [" ".join(row.split()) for row in text.strip().splitlines()]
        return [NUMBER.sub("0", row) if numbers_vary else row for row in rows]

    def part_pattern(part: str) -> str:
        words = NUMBER.split(part) if 0 < percent < math.inf else [part]
        return f"({NUMBER.pattern})".join(map(re.escape, words))

    if numbers_vary and "..." not in expected:  # lines may be wrapped elsewhere, then
        return " ".join(plain(expected)).split() == " ".join(plain(got)).split()
    pattern = ""
    for row in plain(expected):
        if row == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*?".join(map(part_pattern, row.split("..."))) + r"\n"
    match = re.fullmatch(pattern, "".join(row + "\n" for row in plain(got)))
    if match is None or not match.groups():
        return match is not None
    shown = [number for row in plain(expected) for number in NUMBER.findall(row)]
    return all(
        math.isclose(_value(a), _value(b), rel_tol=percent / 100) for a, b in zip(shown, match.groups(), strict=True)
    )


def _value(number: str) -> float:
    minutes, _, rest = number.rpartition(" min ")
    return 60 * float(minutes or 0) + float(rest.replace(",", ""))


def commands(text: str) -> list[tuple[str, str]]:
    """(command, expected output) of a console block; a command goes on after a backslash at a line's end."""
    items: list[tuple[str, str]] = []
    going_on = False
    for line in text.splitlines():
        if line.startswith("$ "):
            items.append((line[2:], ""))
        elif not items:
            raise Failure("a console block begins with a line of output; commands begin with `$ `")
        elif going_on:
            items[-1] = (items[-1][0] + "\n" + line, "")
        else:
            items[-1] = (items[-1][0], items[-1][1] + line + "\n")
        going_on = line.endswith("\\")
    return items


def differ(expected: str, got: str) -> Failure:
    return Failure(f"it shows\n\n{expected.rstrip()}\n\nbut what came is\n\n{got.rstrip()}")


class Runner:
    def __init__(self, has_gpu: bool):
        self.names: dict[str, object] = {"__name__": "document"}
        self.printed: str | None = None
        self.has_gpu = has_gpu
        self.count = 0
        self.files: list[Block] = []
        self.came: dict[int, str] = {}  # line of a console block -> its text with what came

    def run(self, block: Block) -> None:
        if block.language not in LANGUAGES:
            raise Failure(f"a block must say its language, one of {', '.join(LANGUAGES)}; this says {block.language!r}")
        for text in block.directives:
            unfit = {"needs gpu": not self.has_gpu, "shown without a gpu": self.has_gpu}
            if text.startswith("not run, ") or unfit.get(text):
                self.printed = None
                return
            package = re.fullmatch(r"needs package (\w+)", text)
            if package and importlib.util.find_spec(package[1]) is None:
                self.printed = None
                return
            if not package and text not in unfit and not VARY.fullmatch(text) and not re.fullmatch(r"exit \d+", text):
                raise Failure(f"unknown comment: test: {text}")
        vary = next(filter(None, map(VARY.fullmatch, block.directives)), None)
        percent = float(vary["percent"] or "inf") if vary else 0.0
        getattr(self, block.language)(block, percent=percent)

    def python(self, block: Block, *, percent: float) -> None:
        # a real file, because Triton reads the source of its kernels
        self.count += 1
        path = Path(block.title or f"block_{self.count}.py").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
        importlib.invalidate_caches()
        code, out = compile(block.text, str(path), "exec"), io.StringIO()
        if block.title:
            self.files.append(block)  # a reader saves it now, and imports it in a later block
        else:
            with contextlib.redirect_stdout(out):
                exec(code, self.names)
        self.printed = out.getvalue()

    def imported(self, block: Block) -> None:
        """Imports a file, if no block of the document has done so."""
        importlib.import_module(block.title.removesuffix(".py").replace("/", "."))

    def text(self, block: Block, *, percent: float) -> None:
        if self.printed is not None and not agrees(block.text, self.printed, percent=percent):
            raise differ(block.text, self.printed)
        self.printed = None

    def console(self, block: Block, *, percent: float) -> None:
        self.printed = None
        wanted = next((int(text[5:]) for text in block.directives if text.startswith("exit ")), 0)
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
        environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
        received, wrong = "", None
        for command, expected in commands(block.text):
            done = subprocess.run(
                ["bash", "-c", command],
                env=environment,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=SECONDS,
            )
            if done.returncode != wanted:
                printed = f"{done.stdout}\n{done.stderr}"
                raise Failure(f"`{command}` ended with status {done.returncode}, not {wanted}:\n\n{printed}")
            printed = done.stdout if done.stdout.strip() else done.stderr
            received += f"$ {command}\n" + "".join(line.rstrip() + "\n" for line in printed.rstrip().splitlines())
            if wrong is None and expected.strip() and not agrees(expected, printed, percent=percent):
                wrong = differ(f"$ {command}\n{expected}", printed)
        self.came[block.line] = received
        if wrong:
            raise wrong

    def json(self, block: Block, *, percent: float) -> None:
        self.printed = None
        json.loads(block.text)

    def toml(self, block: Block, *, percent: float) -> None:
        self.printed = None
        tomllib.loads(block.text)


def run_document(path: Path, *, has_gpu: bool, update: bool = False) -> None:
    """Raises Failure, with file and line, at the first block that is not what the document says."""
    runner = Runner(has_gpu)
    sys.path.insert(0, os.getcwd())
    os.environ.setdefault("GOLDSMITH_CACHE", os.path.abspath("cache"))  # a reader's own is left alone
    for name in SHOWN:  # a reader stands in the checkout
        if (ROOT / name).is_dir() and not os.path.lexists(name):
            os.symlink(ROOT / name, name)
    text = path.read_text()
    for block in blocks(text):
        _attempt(path, block, runner.run, forgiven=runner.came if update else {})
    for block in runner.files:
        _attempt(path, block, runner.imported)
    if update:
        for block in blocks(text):
            if block.line in runner.came and "numbers vary" in block.directives and "..." not in block.text:
                text = text.replace(block.text, runner.came[block.line])
        path.write_text(text)


def _attempt(path: Path, block: Block, step: Callable[[Block], None], forgiven: Container[int] = ()) -> None:
    try:
        step(block)
    except Exception as error:  # noqa: BLE001 - a document may fail in any way; the block's place is what helps
        if block.line not in forgiven:
            reason = str(error) if isinstance(error, Failure) else traceback.format_exc()
            raise Failure(f"{path}:{block.line}: {reason}") from None


def main(path: str, *flags: str) -> int:
    has_gpu = "--gpu" in flags
    os.environ.pop("TRITON_INTERPRET", None)  # a reader has not set it
    document = Path(path).absolute()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            run_document(document, has_gpu=has_gpu, update="--update" in flags)
        except Failure as failure:
            print(failure, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    atexit.register(gc.freeze)  # otherwise the interpreter's end searches torch and transformers for garbage
    sys.exit(main(*sys.argv[1:]))
