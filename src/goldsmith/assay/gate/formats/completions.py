"""The source in a language model's completion: the last fenced block of code, or the whole text where there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LANGUAGES = {"cuda": "cuda", "cu": "cuda", "cpp": "cpp", "c++": "cpp"}
_OF_CODE = {"", "python", "py", "python3", "triton", *LANGUAGES}  # others are of shells, outputs and texts
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.M | re.S)
_OPEN = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*\n(.*)\Z", re.M | re.S)


def source(completion: object) -> tuple[str, str]:
    """(source, language) of a completion: a text, or messages with "content" as in chats."""
    text = as_text(completion)
    blocks = [(language, body) for _, language, body in _FENCE.findall(text)]
    if not blocks:
        cut = _OPEN.search(text)  # a completion that ended at its limit of tokens
        blocks = [(cut[1], cut[2])] if cut else [("", text)]
    code = [block for block in blocks if block[0].lower() in _OF_CODE]
    language, body = (code or blocks)[-1]
    return body, LANGUAGES.get(language.lower(), "python")


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
