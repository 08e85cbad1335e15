"""Whatever a reader is shown runs, and prints what is shown."""

import doctest
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.modules import ALL as MODULES
from repo.markdown import Failure, agrees, blocks, run_document
from repo.test_exports import modules
from repo.tree import ROOT, files, shown

DOCUMENTS = files(".md")
HAS_GPU = torch.cuda.is_available()


@pytest.mark.sweep(8)  # README.md, train-with.md and wrong-gradient.md take a minute together: not all on one day
@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_block_of_a_document_runs_and_prints_what_it_shows(document, tmp_path):
    # a process of its own: documents register operators and set what is read at import
    command = [sys.executable, str(ROOT / "tests/repo/markdown.py"), str(document), *(["--gpu"] if HAS_GPU else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_link_and_picture_within_the_project_leads_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"<\w+ [^>]*?(?:src|href)=\"([^\"]+)\"", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        assert path.exists(), f"{target} does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{target}: no such heading, there are {sorted(slugs)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_name_that_a_document_mentions_exists(document):
    names = r"`[^`\n]*?(?<!benchmarks\.)\b(assay|experts|mhc|offload|router)\.(?!(?:py|md)\b)([A-Za-z]\w+)"
    for package, name in re.findall(names, document.read_text()):
        module = importlib.import_module(f"goldsmith.{package}")
        there = hasattr(module, name) or find_spec(f"goldsmith.{package}.{name}") or f"{package}.{name}" in MODULES
        assert there, f"goldsmith.{package} has no {name}"


def test_examples_in_docstrings_give_what_they_show():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for module in map(importlib.import_module, modules()):
        if ">>>" in Path(module.__file__).read_text():  # doctest takes 20 ms to see that a module has no example
            assert doctest.testmod(module, optionflags=flags).failed == 0, module.__name__


def test_the_page_of_environment_variables_lists_those_that_the_source_reads():
    pattern = re.compile(r"(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\()\s*\"([A-Z][A-Z0-9_]+)\"")
    read = {name for path in files(".py") if "src/" in shown(path) for name in pattern.findall(path.read_text())}
    page = (ROOT / "docs/environment.md").read_text()
    assert set(re.findall(r"^\| `([A-Z][A-Z0-9_]+)`", page, re.M)) == read


# The runner itself


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(text):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        path = tmp_path / "page.md"
        path.write_text(text.replace("'''", "```"))
        run_document(path, has_gpu=False)

    return run


@pytest.mark.parametrize(
    "text",
    [
        "'''python\n1 / 0\n'''",
        "'''python\nprint(1)\n'''\n'''text\n2\n'''",
        "'''console\n$ echo one\ntwo\n'''",
        "'''console\n$ false\n'''",
        "<!-- test: exit 1 -->\n'''console\n$ true\n'''",
        "'''\nno language\n'''",
        "'''json\n{\n'''",
        "<!-- test: perhaps -->\n'''python\n'''",
        "'''console\noutput before any command\n'''",
        "- in a list\n\n  '''python\n  raise SystemError\n  '''",
        "<!-- test: numbers vary by 2 % -->\n'''console\n$ echo loss 3.40, 33.2% right\nloss 3.41, 31.5% right\n'''",
    ],
)
def test_a_failing_block_is_named_with_its_line(run, text):
    with pytest.raises(Failure, match=r"page\.md:\d"):
        run(text)


@pytest.mark.parametrize(
    "text",
    [
        "'''python\nx = 1\n'''\nprose\n'''python\nprint(x)\n'''\n'''text\n1\n'''",
        "'''python title=mine/op.py\ny = 5\n'''\n'''python\nfrom mine.op import y\nprint(y)\n'''\n'''text\n5\n'''",
        "'''python title=own.py\nz = 6\n'''\n'''console\n$ python -c 'import own; print(own.z)'\n6\n'''",
        "'''console\n$ echo one; \\\n  echo two\none\ntwo\n$ echo three\n'''",
        "<!-- test: exit 3 -->\n'''console\n$ exit 3\n'''",
        "<!-- test: numbers vary -->\n'''console\n$ echo took 3.5 s\ntook 0.01 s\n'''",
        "<!-- test: numbers vary by 2 % -->\n'''console\n$ echo a; echo b 1,010 x 99%\n...\nb 1,000 ... 98.0%\n'''",
        "<!-- test: numbers vary -->\n'''console\n$ echo took 9 s, long\ntook 2 min 3 s,\nlong\n'''",
        "<!-- test: shown without a gpu -->\n'''console\n$ echo progress >&2; echo result\nresult\n'''",
        "<!-- test: exit 2 -->\n'''console\n$ echo wrong >&2; exit 2\nwrong\n'''",
        "<!-- test: needs package no_such_package -->\n'''console\n$ false\n'''",
        "<!-- test: needs package json -->\n'''console\n$ true\n'''",
        "<!-- test: needs gpu -->\n'''python\n1 / 0\n'''\n'''text\nnothing\n'''",
        "<!-- test: not run, for a good reason -->\n'''console\n$ false\n'''",
        "'''text\nan aside\n'''",
    ],
)
def test_a_correct_block_passes(run, text):
    run(text)


def test_the_shown_output_of_a_command_can_be_updated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    text = "# Page\n\n<!-- test: numbers vary -->\n```console\n$ echo {} 2\n{} 1\n```\n"
    page.write_text(text.format("new", "old"))
    run_document(page, has_gpu=False, update=True)
    assert page.read_text() == text.format("new", "new").replace("new 1", "new 2")


@pytest.mark.parametrize(
    "expected, got, holds",
    [
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nd", True),
        ("a\n...", "a", True),
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc", False),
        ("a   b", "a b", True),
        ("a", "a\nb", False),
        ("a.c", "abc", False),
    ],
)
def test_an_elision_matches_any_text(expected, got, holds):
    assert agrees(expected, got) is holds


def test_blocks_know_their_line_language_and_title():
    (block,) = blocks("# Title\n\n```python title=a.py\nx = 1\n```\n")
    assert (block.line, block.language, block.title, block.text) == (3, "python", "a.py", "x = 1\n")
