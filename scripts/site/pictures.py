"""Pictures of the commands in a document: terminals as SVG, pages as PNG.

    python scripts/site/pictures.py [DOCUMENT ...]         the default is README.md and docs/wrong-gradient.md

Runs the files and commands of a document in an empty folder, as its test does. A picture `images/terminal-*.svg` shows
the last command of the console block above it and what that command prints; it shows all commands of a block that is
hidden in a comment `<!-- picture`. A picture `images/page-*.png`
shows the page that the last `--html FILE` above it has written; it needs Chromium, and is left as it is without one.
The text of a terminal is also in the picture's <desc>, for screen readers; a test compares it with the document.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape, unescape
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from assay.chromium import Chromium, find  # noqa: E402
from repo.markdown import Block, blocks, commands  # noqa: E402

COLUMNS = 80  # at least; commands that print wider tables when their output is no terminal get their own width
PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)\s]*images/(?:terminal|page)-[\w-]+\.(?:svg|png))\)", re.M)
DESC = re.compile(r"<desc>(.*?)</desc>", re.S)
# rich's own frame loads a font from another site; this one uses the reader's
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<!-- made by scripts/site/pictures.py -->
<desc>DESC</desc>
<style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
        font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
    {styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(*documents: str) -> int:
    for name in documents or ("README.md", "docs/wrong-gradient.md"):
        draw_all((ROOT / name).resolve())
    return 0


def draw_all(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    wanted = {text.count("\n", 0, match.start()) + 1: document.parent / match[1] for match in PICTURE.finditer(text)}
    shown = [block for block in blocks(text) if block.title or block.language == "console"]
    with tempfile.TemporaryDirectory(prefix="pictures-") as place:
        folder = Path(place)
        shutil.copytree(ROOT / "examples", folder / "examples")  # a link would show this machine's path
        page: Path | None = None
        for number, block in enumerate(shown):
            end = shown[number + 1].line if number + 1 < len(shown) else sys.maxsize
            session = run_block(block, folder)
            if session and (match := re.search(r"--html[ =](\S+)", session[-1][0])):
                page = folder / match[1]
            for line, picture in wanted.items():
                if not block.line < line < end:
                    continue
                if picture.suffix == ".svg":
                    picture.write_text(terminal(*session[0 if block.pictured else -1 :]), encoding="utf-8")
                elif page and find():
                    photograph(page, picture)
                print(picture.relative_to(ROOT), flush=True)


def run_block(block: Block, folder: Path) -> list[tuple[str, str]]:
    """(command, what it prints with its colours) of each command; a block with a title becomes a file instead."""
    if block.title:
        (folder / block.title).write_text(block.text, encoding="utf-8")
        return []
    if any(directive.startswith("not run") for directive in block.directives):
        return []
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TRITON_INTERPRET")}
    environment |= {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment["PATH"] = os.path.dirname(sys.executable) + os.pathsep + environment["PATH"]
    session = []
    for command, _ in commands(block.text):
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
        session.append((command, done.stdout))
    return session


def terminal(*session: tuple[str, str]) -> str:
    """An SVG of a terminal after some commands. The same text gives the same bytes."""
    width, plain = COLUMNS, []
    console = Console(record=True, file=StringIO(), force_terminal=True, color_system="truecolor")
    for number, (command, printed) in enumerate(session):
        body = Text.from_ansi("\n".join(line.rstrip() for line in printed.rstrip().splitlines()))
        width = console.width = max(width, *(len(line.rstrip()) for line in body.plain.splitlines()))
        console.print(*[""] * bool(number), Text.assemble(("$ ", "bold green"), (command, "bold")), sep="\n")
        console.print(body)
        plain += [line.rstrip() for line in f"$ {command}\n{body.plain}".splitlines()]
    console.print("")  # the frame cuts the lower edge of the last line
    drawn = console.export_svg(title="", code_format=FRAME, unique_id="terminal")
    desc = escape("\n".join(plain))
    return re.sub(r"[ \t]+$", "", drawn.replace("<desc>DESC</desc>", f"<desc>{desc}</desc>"), flags=re.M)


def text_of(picture: Path) -> str:
    """What the terminal in a picture says."""
    match = DESC.search(picture.read_text(encoding="utf-8"))
    return unescape(match[1]) if match else ""


def photograph(page: Path, picture: Path) -> None:
    with Chromium() as browser:
        browser.open(page, 900)
        browser.screenshot(picture, most=1000)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
