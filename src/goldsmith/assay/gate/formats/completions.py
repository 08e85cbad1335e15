"""The source in a language model's completion: the last fenced block of code, or the whole text where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

LANGUAGES = {"cuda": "cuda", "cu": "cuda", "cpp": "cpp", "c++": "cpp"}
_OF_CODE = {"", "python", "py", "python3", "triton", *LANGUAGES}  # others are of shells, outputs and texts
# quotes, then the indentation with the numbers or signs of a list, then the fence and the language
_OPENING = re.compile(r"((?:[ \t]*>)*)([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(`{3,}|~{3,})[ \t]*([\w+.-]*)[^`\n]*$")
_QUOTED = re.compile(r"^[ \t]*> ?")


def source(completion: object) -> tuple[str, str]:
    """(source, language) of a completion: a text, or messages with "content" as in chats."""
    text = as_text(completion)
    known = list(_blocks(re.findall(r"[^\n]*\n|[^\n]+", text)))
    # without a closed one: a completion that ended at its limit of tokens
    blocks = [block[:2] for block in known if block[2]] or [block[:2] for block in known] or [("", text)]
    code = [block for block in blocks if block[0].lower() in _OF_CODE]
    language, body = (code or blocks)[-1]
    return body, LANGUAGES.get(language.lower(), "python")


def _blocks(lines: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """(language, text, whether it ends) of each block, without what quotes and lists put before its lines."""
    body: list[str] | None = None
    language, depth, width, closing = "", 0, 0, re.compile("")
    for line in lines:
        if body is None:
            opening = _OPENING.match(line.rstrip())
            if opening is not None:
                quotes, before, fence, language = opening.groups()
                depth = quotes.count(">")
                width = len(before) - bool(depth and before.startswith(" "))
                closing = re.compile(rf"[ \t]*{fence}{fence[0]}*[ \t]*$")
                body = []
            continue
        text, removed = line, 1
        for _ in range(depth):
            text, removed = _QUOTED.subn("", text, count=1)
        if not removed or closing.match(text.rstrip("\r\n")):
            yield language, "".join(body), True
            body = None
        else:
            body.append(re.sub(rf"^[ \t]{{0,{width}}}", "", text))
    if body is not None:
        yield language, "".join(body), False


def as_text(completion: object) -> str:
    """The text of a completion; of messages, the last one of an assistant."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Mapping):
        content = completion.get("content", "")
        return content if isinstance(content, str) else as_text(content)
    if isinstance(completion, Sequence) and completion:
        parts = [c for c in completion if isinstance(c, Mapping)]
        if parts and all("text" in c and "content" not in c for c in parts):
            return "".join(str(c["text"]) for c in parts)  # the parts of one message
        own = [c for c in parts if c.get("role", "assistant") == "assistant"]
        return as_text((own or parts or list(completion))[-1])
    return ""
