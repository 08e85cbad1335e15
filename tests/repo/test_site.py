"""The documentation as a site: every page is reachable, every public name is in it, and nothing leads nowhere."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

import goldsmith
from assay import chromium
from repo.markdown import agrees, blocks
from repo.tree import ROOT, files, shown

MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
needs_docs = pytest.mark.skipif(bool(MISSING), reason=f"the extra `docs` is not installed: {', '.join(MISSING)}")
PACKAGES = ("assay", "core", "mhc", "router", "experts", "distributed", "hf", "offload")
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()
# pages that scripts/site/pages.py makes from files outside of docs/
MADE = ("api/", "mathematics/", "contributing.md", "changes.md", "security.md")


def test_every_document_is_in_the_navigation_and_every_entry_is_a_document():
    listed = re.findall(r"^ +- (?:.*: )?([\w/.-]+\.md)$", CONFIGURATION.partition("\nnav:")[2], re.M)
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in files(".md") if "docs" in path.parts}
    assert len(listed) == len(set(listed))
    assert {name for name in listed if not name.startswith(MADE)} == documents


def test_the_first_page_leads_to_every_document_but_the_long_tables():
    first = (ROOT / "docs" / "README.md").read_text()
    documents = {path.name for path in files(".md") if path.parent == ROOT / "docs" and path.name != "README.md"}
    assert [name for name in sorted(documents) if f"({name})" not in first and not name.endswith("-rows.md")] == []


def test_the_navigation_begins_with_the_three_doors():
    titles = re.findall(r"^  - (.*):$", CONFIGURATION.partition("\nnav:")[2], re.M)
    assert titles[1:4] == ["Check a kernel", "Train or run a model", "Use the operators"]


def test_the_citation_names_the_version():
    assert f"\nversion: {goldsmith.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pictures_load_nothing_from_other_sites():
    links = {
        shown(path): re.findall(r"(?:href|src)=\"http|url\(.?http|@import", path.read_text()) for path in files(".svg")
    }
    assert {name for name, entry in links.items() if entry} == set()


# Pictures of terminals


def pictures():
    for document in files(".md"):
        text = document.read_text()
        for match in re.finditer(r"^!\[[^\]]*\]\(([^)]*images/terminal-[\w-]+\.svg)\)", text, re.M):
            before = [block for block in blocks(text[: match.start()]) if block.language == "console"]
            yield pytest.param(document.parent / match[1], before[-1], id=f"{document.name}-{Path(match[1]).stem}")


@pytest.mark.parametrize("picture, block", list(pictures()))
def test_a_picture_of_a_terminal_shows_what_the_block_above_it_shows(picture, block):
    pytest.importorskip("rich")
    from scripts.site.pictures import text_of

    # a test runs the block and compares its output; the picture differs in numbers and in the line breaks of rich
    at, text = 0, plain(text_of(picture))
    command = re.findall(r"^\$ .*$", block.text, re.M)[0 if block.pictured else -1]
    assert text.startswith(plain(command))
    for part in re.split(r"\.\.\.", block.text[block.text.rindex(command) :]):
        at = text.find(plain(part), at)
        assert at >= 0, f"{picture.name} does not show {part!r}: run python scripts/site/pictures.py"


def plain(text):
    return " ".join(re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "0", text).split())


def test_every_terminal_is_drawn_with_its_text():
    pytest.importorskip("rich")
    from scripts.site.pictures import terminal

    session = ("cat a", "x\n"), ("goldsmith verify a:b", "\x1b[31mFAIL\x1b[0m  x < y\n")
    drawn = terminal(*session)
    assert "<desc>$ cat a\nx\n$ goldsmith verify a:b\nFAIL  x &lt; y</desc>" in drawn
    assert drawn == terminal(*session)
    assert agrees("...FAIL...", re.findall(r">(FAIL)<", drawn)[0])


# Docstrings


@needs_docs
@pytest.mark.parametrize(
    "docstring, markdown",
    [
        ("y = a * x_i,  summed", "```text\ny = a * x_i,  summed\n```\n"),
        ("Draws a * b.\n\nOf x_i [..., n].", "Draws a \\* b.\n\nOf x\\_i \\[..., n\\].\n"),
        ("Words.\n\nk    the number\n     of experts\nv    `a * b`", None),
        ("Words.\n\n    t(n) = n * f", "Words.\n\n```text\nt(n) = n * f\n```\n"),
        ("A pair (x, y) -> z\nin two lines of prose.", "A pair (x, y) -\\> z\nin two lines of prose.\n"),
    ],
)
def test_docstrings_become_markdown_without_accidents(docstring, markdown):
    from scripts.site.docstrings import to_markdown

    table = "Words.\n\n| | |\n| --- | --- |\n| `k` | the number of experts |\n| `v` | `a * b` |\n"
    assert to_markdown(docstring) == (markdown or table)


@needs_docs
@pytest.mark.parametrize("package", ("goldsmith", *PACKAGES))
def test_the_reference_has_the_names_that_a_package_exports(package):
    from scripts.site.reference import public_names

    module = importlib.import_module("goldsmith" if package == "goldsmith" else f"goldsmith.{package}")
    assert sorted(public_names(package)) == sorted(module.__all__)


def test_options_stay_whole_and_long_names_are_broken_at_separators_only():
    from scripts.site.layout import laid_out

    whole = '<span class="whole">{}</span>'.format
    assert laid_out("<code>make --dry-run</code>") == f"<code>make {whole('--dry-run')}</code>"
    assert laid_out("<td>with --cache static</td>") == f"<td>with {whole('--cache')} static</td>"
    long = "<code>src/goldsmith/assay/results.py</code>"
    assert laid_out(long) == "<code>src/<wbr>goldsmith/<wbr>assay/<wbr>results.<wbr>py</code>"
    for text in ("<code>core/op.py</code>", "<pre><code>cmd --option</code></pre>", "well-known", "a - b", "x -1"):
        assert laid_out(text) == text


def test_a_column_is_as_wide_as_its_text_needs():
    from scripts.site.layout import laid_out

    text = "a sentence of some forty-five characters, say"
    table = "<table><tr><th>{}</th><th{}>b</th></tr><tr><td>1</td><td><code>{}</code></td></tr></table>".format
    assert laid_out(table("a", "", text)).startswith('<table><tr><th>a</th><th class="w3">b</th></tr>')
    aligned = ' style="text-align: right;"'
    assert f'<th class="w1"{aligned}>b</th>' in laid_out(table("a", aligned, "13 characters"))


@needs_docs
def test_a_package_begins_with_its_names_and_what_they_are():
    from scripts.site.reference import reference

    page = reference("mhc")
    first, second = page.split("\n")[2:5:2]
    assert first.startswith("Manifold-constrained hyper-connections") and "(../mathematics/mhc.md)" in second
    assert "| [`expand`][goldsmith.mhc.expand" in page and "copies one stream to n equal ones" in page
    assert page.index("| [`HyperConnection`]") < page.index("| [`boundary`]") < page.index(":::")
    assert "| [`goldsmith.distributed`](distributed.md) | Models with this library" in reference("goldsmith")


# The site itself, which is built on one day of three

on_the_day_of_the_site = pytest.mark.sweep(3, part=0)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe") and values.get("src"):
            self.loads.append(values["src"])
        elif tag == "link" and values.get("href") and values.get("rel") != "canonical":
            self.loads.append(values["href"])


@needs_docs
@on_the_day_of_the_site
def test_the_site_is_built_strictly_and_is_complete(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"\w+:", link):
                wrong += [f"{path.name} loads {link}"] if link in page.loads and link.startswith("http") else []
                continue
            name, _, anchor = unquote(link).partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists():
                wrong.append(f"{path.name}: {link} does not exist")
            elif anchor and there in pages and anchor not in pages[there].anchors:
                wrong.append(f"{path.name}: {link}: no such place")
    assert wrong == []

    for package in PACKAGES:
        page = site / "api" / f"{package}.html"
        text = page.read_text()
        for name in importlib.import_module(f"goldsmith.{package}").__all__:
            assert f"{package}.{name}" in re.sub(r"<[^>]+>", "", text), f"{package}.{name} is not in the reference"
    for name in goldsmith.__all__:
        assert f"goldsmith.{name}" in (site / "api/goldsmith.html").read_text().replace("<wbr>", "")
    # the search works from the file system: its index is a script, and a frame stands in for the worker
    assert (site / "search/search_index.js").exists() and "iframe-worker.js" in (site / "index.html").read_text()
    # a sentence of a docstring, the light and the dark colours, and the index of the search
    assert "nothing is broadcast" in (site / "api/mhc.html").read_text()
    index = (site / "index.html").read_text()
    assert 'data-md-color-scheme="slate"' in index and 'data-md-color-scheme="default"' in index
    assert "goldsmith verify" in (site / "search/search_index.json").read_text()


needs_chromium = pytest.mark.skipif(chromium.find() is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium(scripts=True) as opened:
        yield opened


@needs_docs
@needs_chromium
@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.sweep(9, part=n // 2 * 3)) for n in range(6)])
def test_on_a_phone_no_page_scrolls_sideways_and_no_word_is_broken(site, browser, part):
    pages = sorted(path for path in site.rglob("*.html") if "source" not in path.parts)
    assert len(pages) > 40
    wrong = {}
    for path in pages[part::6]:
        browser.open(path, 390)
        wrong[path.name] = browser.size()[0], browser.broken_words()
    assert {name: found for name, found in wrong.items() if found != (390, [])} == {}


@needs_docs
@needs_chromium
@on_the_day_of_the_site
@pytest.mark.parametrize(
    "query, place",
    [
        ("--eval-data", "goldsmith finetune"),
        ("product_topk", "router.product_topk"),
        ("save_adapter", "hf.save_adapter"),
    ],
)
def test_the_search_finds_an_option_and_a_name_as_one_types_them(site, browser, query, place):
    browser.open(site / "index.html", 1280)
    browser.run("document.querySelector('[data-md-toggle=search]').click()")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type(query)
    found = browser.run(
        """new Promise(done => {
          const look = tries => {
            const titles = [...document.querySelectorAll(".md-search-result__item :is(h1, h2)")].map(h => h.innerText)
            titles.length || !tries ? done(titles) : setTimeout(look, 100, tries - 1)
          }
          look(100)
        })"""
    )
    assert place in found[:16]
