"""Errors of functions as sentences of a command: options in place of keywords, each path once."""

from __future__ import annotations

import re
from collections.abc import Sequence

FUNCTION = re.compile(r"^(?:goldsmith\.)?(?:hf|offload|experts|ExpertStore)(?:\.\w+)*: ")


def sentence(error: BaseException, options: Sequence[str] = ()) -> str:
    """The text of an error as a sentence, without the name of a function and the number of a system's error.

    options   keyword arguments that are options of the command: `group_size=7` becomes `--group-size 7`
    """
    text = in_options(str(error), options)
    if isinstance(error, OSError) and error.strerror:
        text = in_options(error.strerror, options)
        if error.filename is not None and str(error.filename) not in text:
            text = f"{error.filename}: {text}"
    text = text or type(error).__name__
    return text if text.endswith((".", "?", "!")) else f"{text}."


def in_options(text: str, options: Sequence[str]) -> str:
    """A message of a function in the words of a command."""
    text = FUNCTION.sub("", " ".join(text.split()))
    for name in options:
        text = re.sub(rf"(?<![\w.-]){name}=(?=[\w'\"])", f"--{name.replace('_', '-')} ", text)
    return text


def about(argument: str, place: object, text: str) -> str:
    """`text` about an argument of the command: "MODEL folder: text", in which the text does not name the folder again.

    A text that begins with an option is about that option and stays as it is.
    """
    if text.startswith("--"):
        return text
    rest = text.removeprefix(str(place))
    if rest == text or rest[:1] not in (":", "/", " "):
        return f"{argument} {place}: {text}"
    return f"{argument} {place}: {rest[1:]}" if rest.startswith("/") else f"{argument} {place}{rest}"
