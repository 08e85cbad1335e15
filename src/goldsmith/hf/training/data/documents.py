"""Documents: tokens, and which of them are trained on, made from the rows of files and data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...model_types import Tokenizer
from ..errors import DataError
from .conversations import conversation, templated
from .formats import ChatMessages, PlainText, PromptedText, content_of, format_of
from .rows import DataSource, RowPlace
from .sources import sources

AT_ONCE = 512  # documents in one call of the tokenizer


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other. `trained[i]`: token i's prediction has a loss; the first is never predicted."""

    ids: list[int]
    trained: list[bool]
    divisible: bool = False  # plain text, which may be split anywhere
    place: RowPlace | None = None  # where it was read

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
    data: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    document: str = "blank",
    train_on: str = "completion",
) -> list[Document]:
    """The documents of files, folders and data sets by name; see `read_sources`.

    document   "blank" splits text at blank lines, "whole" keeps it as one document
    """
    return read_sources(sources(data, document=document), tokenizer, train_on=train_on)


def read_sources(of: Sequence[DataSource], tokenizer: Tokenizer, *, train_on: str = "completion") -> list[Document]:
    """The documents of sources that all have the same format.

    train_on   "completion" trains on completions and the assistant's messages, "all" on every token; plain text is
               trained on in full either way
    Raises DataError with file, line and reason.
    """
    documents: list[Document] = []
    formats: dict[str, str] = {}  # the format of the first row of each source
    for source in of:
        read_documents = list(_documents(source, tokenizer, train_on == "all", formats))
        if not any(item.targets for item in read_documents):
            raise DataError(source.name, "nothing in it can be predicted: every document is a single token")
        documents += [item for item in read_documents if item.targets]
    return documents


def _documents(source: DataSource, tokenizer: Tokenizer, every: bool, formats: dict[str, str]) -> Iterator[Document]:
    """The documents of one source; plain text goes to the tokenizer many rows at a time."""
    chat = bool(getattr(tokenizer, "chat_template", None))
    texts: list[tuple[RowPlace, str]] = []
    for row in source.rows():
        try:
            format = format_of(row.columns, from_table=row.from_table)
            if source.name not in formats:
                _check_same_format(source.name, format, formats)
            content = content_of(format, row.columns, chat=chat, from_table=row.from_table)
            if isinstance(content, PlainText):
                texts.append((row.place, content.text))
                if len(texts) < AT_ONCE:
                    continue
            yield from _texts(texts, tokenizer)
            texts = []
            if isinstance(content, PromptedText):
                yield _completion(content, tokenizer, every, row.place)
            elif isinstance(content, ChatMessages):
                yield _conversation(content, tokenizer, every, row.place)
        except ValueError as error:
            raise row.place.error(str(error)) from error
    yield from _texts(texts, tokenizer)


def _check_same_format(name: str, format: str, formats: dict[str, str]) -> None:
    """Raises ValueError if a source has another format than the one before it: most likely it is a stray file."""
    if formats and format not in formats.values():
        other, theirs = next(iter(formats.items()))
        raise ValueError(f"its rows have {format}, and those of {other} have {theirs}: give files of one format")
    formats[name] = format


def cut(documents: Iterable[Document], seq_len: int) -> CutDocuments:
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
                kept.append(Document(item.ids[part], item.trained[part], True, item.place))
        else:
            short = Document(item.ids[:seq_len], item.trained[:seq_len], False, item.place)
            if not short.targets:
                before = item.trained.index(True)
                reason = f"{before:,} tokens come before the first trained one, and --seq-len is {seq_len:,}"
                place = item.place or RowPlace("the data", 0)
                raise place.error(f"{reason}; raise --seq-len or shorten the prompt")
            shortened += 1
            kept.append(short)
    return CutDocuments(kept, shortened)


def _texts(texts: Sequence[tuple[RowPlace, str]], tokenizer: Tokenizer) -> Iterator[Document]:
    """Documents of plain text: the tokenizer's prefix, the text, the end token."""
    if not texts:
        return
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for (place, _), ids in zip(texts, tokenizer([text for _, text in texts], verbose=False)["input_ids"]):
        ids = ids if ids[-1:] == end else ids + end
        yield Document(ids, [True] * len(ids), True, place)


def _completion(content: PromptedText, tokenizer: Tokenizer, every: bool, place: RowPlace) -> Document:
    """Prompt and completion tokenized separately, as they are when text is generated after a prompt."""
    prompt = tokenizer(content.prompt, verbose=False)["input_ids"]
    rest = tokenizer(content.completion, add_special_tokens=False, verbose=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        prompt = prompt[:-1] if prompt[-1:] == [tokenizer.eos_token_id] else prompt  # some tokenizers end every text
        rest = [*rest, tokenizer.eos_token_id]
    if not prompt and len(rest) < 2:
        raise ValueError("'prompt' and 'completion' together are one token, and the first token is never predicted")
    return Document(prompt + rest, [every] * len(prompt) + [True] * len(rest), False, place)


def _conversation(content: ChatMessages, tokenizer: Tokenizer, every: bool, place: RowPlace) -> Document:
    arguments = content.template_arguments
    if content.prompt:
        tokens = templated(
            content.prompt, content.messages, tokenizer, every=every, tools=content.tools, arguments=arguments
        )
    else:
        tokens = conversation(content.messages, tokenizer, every=every, tools=content.tools, arguments=arguments)
    return Document(*tokens, False, place)
