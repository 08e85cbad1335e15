"""The README for a package index, which has none of the checkout's files: links into the checkout become plain words.

A provider of dynamic metadata for scikit-build-core (pyproject.toml names it).
"""

import re
from collections.abc import Mapping
from pathlib import Path

README = Path("README.md")


def without_local_links(text: str) -> str:
    """`text` without comments, images and links to files of the checkout; the words of links and code blocks stay.

    The block behind a picture of a terminal takes the picture's place.
    """
    text = re.sub(r"^<!-- picture\n(.*?)^-->\n", r"\1", text, flags=re.M | re.S)
    pieces = re.split(r"(```.*?```)", text, flags=re.S)
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"<img\b[^>]*\bsrc=\"(?!https?:)[^>]*>", "", pieces[i])
        pieces[i] = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n?", "", pieces[i])
        pieces[i] = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", pieces[i])
        pieces[i] = re.sub(r"<!--.*?-->\n?", "", pieces[i], flags=re.S)
    return "".join(pieces)


def dynamic_metadata(settings: Mapping[str, object], _project: Mapping[str, object]) -> dict[str, dict[str, str]]:
    if settings:
        raise ValueError(f"index_readme: takes no settings, got {dict(settings)}")
    text = without_local_links(README.read_text(encoding="utf-8"))
    return {"readme": {"content-type": "text/markdown", "text": text}}
