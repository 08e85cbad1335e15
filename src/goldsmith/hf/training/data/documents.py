"""Reads training data, text or JSON rows, into documents: tokens, and which of them are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...model_types import Tokenizer
from ..errors import DataError
from .conversations import conversation

SUFFIXES = (".txt", ".md", ".jsonl")
SHAPES = '{"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}]}'
BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
AT_ONCE = 512  # documents in one call of the tokenizer


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other. `trained[i]`: token i's prediction has a loss; the first is never predicted."""

    ids: list[int]
    trained: list[bool]
    divisible: bool = False  # plain text, which may be split anywhere
    line: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """The number of predictions with a loss."""
        return sum(self.trained[1:])


@dataclass(frozen=True)
class CutDocuments:
    """Documents of at most `seq_len` tokens, and the number of rows that were shortened."""

    documents: list[Document]
    shortened: int


def read(
    path: str | Path, tokenizer: Tokenizer, *, document: str = "blank", train_on: str = "completion"
) -> list[Document]:
    """The documents of a file: text from .txt and .md, one row per line from .jsonl.

    document   "blank" splits text at blank lines, "whole" keeps it as one document
    train_on   "completion" trains on completions and the assistant's messages, "all" on every token; plain text is
               trained on in full either way
    Raises DataError with file, line and reason.
    """
    path = Path(path)
    check(path)
    text = decoded(path)
    if not text.strip():
        raise DataError(path, "the file is empty; at least one document is needed")
    if path.suffix.lower() == ".jsonl":
        documents = list(_rows(path, text, tokenizer, train_on == "all"))
    else:
        documents = list(_texts(list(paragraphs(text) if document == "blank" else [(1, text)]), tokenizer))
    if not any(item.targets for item in documents):
        raise DataError(path, "nothing in it can be predicted: every document is a single token")
    return [item for item in documents if item.targets]


def check(path: Path) -> None:
    """Refuses missing files and unsupported kinds, before slow work begins."""
    if path.suffix.lower() not in SUFFIXES:
        ending = f"the name ends in {path.suffix}" if path.suffix else "the name has no ending"
        raise DataError(path, f"{ending}; supported are {', '.join(SUFFIXES)}")
    if not path.is_file():
        kind = "it is a folder" if path.is_dir() else "it is not an ordinary file"
        raise DataError(path, kind if path.exists() else "there is no such file")


def decoded(path: Path) -> str:
    """The file's text; raises DataError unless it is UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}") from error
    if raw[:2] in BOMS:
        raise DataError(path, f"the text is {BOMS[raw[:2]]}, not UTF-8; `iconv -f UTF-16 -t UTF-8` converts it")
    if (at := raw.find(b"\0")) >= 0:
        line = raw.count(b"\n", 0, at) + 1
        problem = f"byte 0x00 at offset {at}, which text never contains"
        raise DataError(path, f"{problem}; if it is UTF-16, `iconv -f UTF-16LE -t UTF-8` converts it", line)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8"
        raise DataError(path, f"{problem}; convert the file, for instance `iconv -f LATIN1 -t UTF-8`", line) from error


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, separated by blank lines."""
    at, line = 0, 1
    for gap in [*re.finditer(r"\n(?:[ \t]*\n)+", text), None]:
        end = gap.start() if gap else len(text)
        if text[at:end].strip():
            yield line, text[at:end].strip("\n")
        after = gap.end() if gap else end
        line += text.count("\n", at, after)
        at = after


def cut(path: str | Path, documents: list[Document], seq_len: int) -> CutDocuments:
    """Splits text into pieces of `seq_len` that overlap by one token, so each token is predicted once; shortens rows.

    Raises DataError for a row that would lose all of its trained tokens.
    """
    kept, shortened = [], 0
    for item in documents:
        if len(item) <= seq_len:
            kept.append(item)
        elif item.divisible:
            for first in range(0, len(item) - 1, seq_len - 1):
                part = slice(first, first + seq_len)
                kept.append(Document(item.ids[part], item.trained[part], True, item.line))
        else:
            short = Document(item.ids[:seq_len], item.trained[:seq_len], False, item.line)
            if not short.targets:
                before = item.trained.index(True)
                reason = f"{before:,} tokens come before the first trained one, and --seq-len is {seq_len:,}"
                raise DataError(path, f"{reason}; raise --seq-len or shorten the prompt", item.line)
            shortened += 1
            kept.append(short)
    return CutDocuments(kept, shortened)


def _texts(texts: list[tuple[int, str]], tokenizer: Tokenizer) -> Iterator[Document]:
    """Documents of plain text: the tokenizer's prefix, the text, the end token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(texts), AT_ONCE):
        some = texts[first : first + AT_ONCE]
        for (line, _), ids in zip(some, tokenizer([text for _, text in some], verbose=False)["input_ids"]):
            ids = ids if ids[-1:] == end else ids + end
            yield Document(ids, [True] * len(ids), True, line)


def _rows(path: Path, text: str, tokenizer: Tokenizer, every: bool) -> Iterator[Document]:
    for line, row in _parsed(path, text):
        try:
            yield from _row(row, tokenizer, every, line)
        except ValueError as error:
            raise DataError(path, str(error), line) from error


def _parsed(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    for line, raw in enumerate(text.split("\n"), 1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except json.JSONDecodeError as error:  # its own line number counts within the row, so it is always 1
            raise DataError(path, f"not JSON: {error.msg} (column {error.colno}); a row is {SHAPES}", line) from error
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise DataError(path, f"not JSON: {why}; a row is {SHAPES}", line) from error
        if not isinstance(row, dict):
            raise DataError(path, f"{_with_article(row)}; a row is {SHAPES}", line)
        yield line, row


def _row(row: dict[str, object], tokenizer: Tokenizer, every: bool, line: int) -> Iterator[Document]:
    kinds = [kind for kind in ("text", "prompt", "messages") if kind in row]
    if len(kinds) != 1 or ("completion" in row) != (kinds == ["prompt"]):
        raise ValueError(f"has the keys {', '.join(map(repr, row)) or '(none)'}; a row is {SHAPES}")
    if kinds == ["text"]:
        yield from _texts([(line, text_field(row, "text"))], tokenizer)
    elif kinds == ["prompt"]:
        yield _completion(row, tokenizer, every, line)
    else:
        yield Document(*conversation(row["messages"], tokenizer, every=every), False, line)


def _completion(row: dict[str, object], tokenizer: Tokenizer, every: bool, line: int) -> Document:
    """Prompt and completion tokenized separately, as they are when text is generated after a prompt."""
    prompt = tokenizer(text_field(row, "prompt", empty=True), verbose=False)["input_ids"]
    rest = tokenizer(text_field(row, "completion"), add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        prompt = prompt[:-1] if prompt[-1:] == [tokenizer.eos_token_id] else prompt  # some tokenizers end every text
        rest = [*rest, tokenizer.eos_token_id]
    if not prompt and len(rest) < 2:
        raise ValueError("'prompt' and 'completion' together are one token, and the first token is never predicted")
    return Document(prompt + rest, [every] * len(prompt) + [True] * len(rest), False, line)


def _with_article(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def text_field(row: dict[str, object], key: str, *, empty: bool = False) -> str:
    """The text under a key; raises ValueError if it is not text, empty, or not valid Unicode."""
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_with_article(value)}; expected text")
    if not value and not empty:
        raise ValueError(f"{key!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} contains an unpaired surrogate, U+{ord(value[error.start]):04X}") from error
    return value
