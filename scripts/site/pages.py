"""The pages of the site that are no files of docs/, and links between all of them: a hook of mkdocs.

    api/PACKAGE.md       every public name of a package, from its `__all__`
    mathematics/*.md     the README of an operator family
    contributing.md ...  the files in the project's root that readers look for
    source/**            each file of source to which a page links, so that the site is complete without a repository

A link in any of them is written as in the repository; here it becomes a link to the page of the same file.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.site.layout import laid_out
from scripts.site.reference import PACKAGES, reference

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "src/goldsmith/mhc/README.md": "mathematics/mhc.md",
    "src/goldsmith/router/README.md": "mathematics/router.md",
    "src/goldsmith/experts/README.md": "mathematics/experts.md",
    "src/goldsmith/offload/README.md": "mathematics/offload.md",
}
# pages of long tables, which take the place of the table of contents too
WIDE = ("operators.md", "speed-rows.md", "speed-experts-rows.md", "kernelfault-rows.md")
FENCE = re.compile(r"^ *```.*?^ *```[^\n]*$", re.M | re.S)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".md": "markdown", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PACKAGES:
        files.append(File.generated(config, f"api/{name}.md", content=reference(name)))
    for origin, page in FROM_ROOT.items():
        if (ROOT / origin).is_file():
            files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
    for path in linked_sources(files):
        content = folder_page(path) if path.is_dir() else source_page(path)
        files.append(File.generated(config, source_uri(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith(("api/", "source/")):
        return markdown
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    if uri in (*WIDE, "changes.md"):
        page.meta["search"] = {"boost": 0.2}  # they have every word, and seldom the answer
    return outside_fences(lambda text: with_site_links(text, uri), in_python_markdown(markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return html if page.file.src_uri.startswith("source/") else laid_out(html)


def on_post_build(config: MkDocsConfig) -> None:
    # its links begin at the root of a server, and the site opens from the file system
    (Path(config.site_dir) / "404.html").unlink(missing_ok=True)


def in_python_markdown(text: str) -> str:
    """Markdown as GitHub reads it, in the forms that Python's reader needs."""
    text = re.sub(r"^ *<!-- (?!generated).*? -->\n", "", text, flags=re.M)  # how a block is tested
    text = re.sub(r"^(```\w+) title=([^\"\n]+)$", r'\1 title="\2"', text, flags=re.M)
    return outside_fences(lambda part: re.sub(r"(?m)^(?!\s*[-|#*<]|\s*\d+\. |\s*$)(.*)\n(?=- )", r"\1\n\n", part), text)


def outside_fences(change: Callable[[str], str], text: str) -> str:
    """The text with `change` applied to everything except blocks of code."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


# Links


def origin_of(uri: str) -> str:
    """The file of the repository from which a page is made."""
    return next((origin for origin, page in FROM_ROOT.items() if page == uri), f"docs/{uri}")


def target_of(link: str, uri: str) -> tuple[str, str] | None:
    """(file of the repository, anchor) of a link on the page `uri`; None for links to other sites and within it."""
    name, _, anchor = link.partition("#")
    if "://" in link or link.startswith("mailto:") or not name:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin_of(uri)), name)), anchor


def uri_of(path: str) -> str:
    """The page, or the file of docs/, that shows this file of the repository."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else source_uri(ROOT / path)


def source_uri(path: Path) -> str:
    inside = path.relative_to(ROOT).as_posix()
    return f"source/{inside}/index.md" if path.is_dir() else f"source/{inside}.md"


def with_site_links(text: str, uri: str) -> str:
    def replaced(match: re.Match) -> str:
        target = target_of(match[2], uri)
        if target is None or target[0] == "README.md":
            return match[0]
        there = posixpath.relpath(uri_of(target[0]), posixpath.dirname(uri) or ".")
        return f"{match[1]}{there}{'#' + target[1] if target[1] else ''}{match[3]}"

    return LINK.sub(replaced, text)


def linked_sources(files: Files) -> list[Path]:
    """Files and folders to which pages link, and which are no pages themselves."""
    paths: set[Path] = set()
    for file in files.documentation_pages():
        if file.src_uri.startswith("api/"):
            continue
        for match in LINK.finditer(FENCE.sub("", file.content_string)):
            target = target_of(match[2], file.src_uri)
            if target and not target[0].startswith("docs/") and target[0] not in FROM_ROOT:
                paths.add(ROOT / target[0])
    return sorted(path for path in paths if path.exists() and path != ROOT / "README.md")


def source_page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    fence = "`" * 4
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {name}\n\n"
    return f'{head}{fence}{LANGUAGES.get(path.suffix, "text")} linenums="1"\n{text.rstrip()}\n{fence}\n'


def folder_page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    names = sorted(child.name for child in path.iterdir() if child.suffix in (".py", ".h", ".cpp", ".md"))
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {name}\n\n"
    return head + "".join(f"- `{child}`\n" for child in names)
