"""What is read: text, rows, conversations, which tokens count, and what is said of what cannot be read."""

import json
import os

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

from cli.finetune_tools import VERSE, tiny_tokenizer
from goldsmith.hf.training.data.documents import Document, cut, read
from goldsmith.hf.training.data.rows import RowPlace
from goldsmith.hf.training.data.text_files import paragraphs
from goldsmith.hf.training.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def reading(tmp_path, tokenizer):
    def reading(content, name="data.jsonl", **options):
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read(path, tokenizer, **options)

    return reading


def counted(document, tokenizer):
    """The text whose tokens count, and the text of all."""
    ids = [token for token, counts in zip(document.ids, document.trained) if counts]
    return tokenizer.decode(ids), tokenizer.decode(document.ids)


def tokens(documents):
    return [(document.ids, document.trained, document.place.number) for document in documents]


def test_text_is_divided_at_blank_lines_or_kept_whole(reading, tokenizer):
    result = reading(VERSE.replace("\n\n", "\n \t\n\n") + "\n\n\n", "verse.txt")
    assert len(result) == 5 and tokenizer.decode(result[0].ids).endswith("more temperate.<|end|>")
    assert [d.place.number for d in result[:3]] == [1, 5, 9]
    (whole,) = reading(VERSE, "verse.md", document="whole")
    assert tokenizer.decode(whole.ids) == VERSE + "<|end|>"
    assert all(whole.trained) and whole.divisible


def test_windows_line_ends_and_a_byte_order_mark_are_removed(reading):
    plain = reading(VERSE, "a.txt")
    marked = reading(b"\xef\xbb\xbf" + VERSE.replace("\n", "\r\n").encode(), "b.txt")
    assert tokens(marked) == tokens(plain)


def test_paragraphs_have_their_line_numbers():
    assert list(paragraphs("\n\na\nb\n\n\n c\n")) == [(3, "a\nb"), (7, " c")]


class Scanned(str):
    """A text that adds up how many characters are looked through for line ends."""

    looked_at = 0

    def count(self, what, first=0, end=None):
        end = len(self) if end is None else end
        self.looked_at += end - first
        return super().count(what, first, end)


def test_line_numbers_are_found_in_one_pass():
    text = Scanned(VERSE * 50)
    result = list(paragraphs(text))
    assert len(result) == 4 * 50 + 1 and text.looked_at <= len(text)
    lines = text.split("\n")
    assert all(lines[line - 1] == words.split("\n")[0] for line, words in result)


def test_a_file_name_extension_may_be_in_capitals(reading, tokenizer):
    assert tokens(reading(VERSE, "VERSE.TXT")) == tokens(reading(VERSE, "verse.txt"))
    assert counted(reading([{"prompt": "a", "completion": "b"}], "ROWS.JSONL")[0], tokenizer)[0] == "b<|end|>"


def test_of_a_prompt_and_its_completion_only_the_completion_is_trained_on(reading, tokenizer):
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}]
    assert counted(reading(rows)[0], tokenizer) == ("4<|end|>", "2 + 2 = 4<|end|>")
    assert counted(reading(rows, train_on="all")[0], tokenizer)[0] == "2 + 2 = 4<|end|>"


def test_of_a_conversation_only_the_assistants_messages_are_trained_on(reading, tokenizer):
    turns = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "Bye"),
        ("assistant", "So long"),
    ]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    message, text = counted(reading(rows)[0], tokenizer)
    assert message == "Hello!<|end|>So long<|end|>"
    assert text.startswith("<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!")
    assert counted(reading(rows, train_on="all")[0], tokenizer)[0] == text


def test_a_template_that_rewrites_earlier_turns_is_rejected_if_answers_must_be_located(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    path = tmp_path / "chat.jsonl"
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match="line 1: the chat template writes message 2 differently when more"):
        read(path, tokenizer)
    assert all(read(path, tokenizer, train_on="all")[0].trained)


@pytest.mark.parametrize(
    "row, message",
    [
        ("{not json", r"not JSON: Expecting property name enclosed in double quotes \(column 2\); a row is"),
        ('{"prompt": "a", "comp', r"not JSON: Unterminated string starting at \(column 17\); a row is"),
        ("[" * 100_000, "not JSON: it is nested too deeply; a row is"),
        ("[1]", "a list; a row is"),
        ('{"txt": "a"}', "has the keys 'txt'; a row is"),
        ('{"text": "a", "prompt": "b", "completion": "c"}', "has the keys 'text', 'prompt', 'completion'"),
        ('{"prompt": "b"}', "has the keys 'prompt'; a row is"),
        ('{"text": 3}', "'text' is a number; expected text"),
        ('{"text": ""}', "'text' is empty"),
        ('{"prompt": "b", "completion": ""}', "'completion' is empty"),
        (r'{"text": "a\ud800"}', r"'text' contains an unpaired surrogate, U\+D800"),
        ('{"messages": "hello"}', "'messages' is not a list"),
        ('{"messages": [{"role": "user"}]}', "message 1 lacks 'role' or 'content'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "'content' of message 1 is a list"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message is the assistant's; the roles are user"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_reason(reading, row, message):
    with pytest.raises(DataError, match=rf"data\.jsonl, line 3: {message}"):
        reading('{"text": "fine"}\n\n' + row + "\n")


@pytest.mark.parametrize(
    "content, name, message",
    [
        (b"", "a.txt", "the file is empty"),
        (b" \n\n", "a.jsonl", "the file is empty"),
        (b"caf\xe9 au lait", "a.txt", r"line 1: byte 0xe9 at offset 3 is not UTF-8; convert the file"),
        (b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl", "line 2: byte 0xff at offset 24 is not UTF-8"),
        ("caf\u00e9".encode("utf-16"), "a.txt", "the text is UTF-16, not UTF-8"),
        (
            "cafe".encode("utf-16-le"),
            "a.txt",
            "line 1: byte 0x00 at offset 1, which text never contains; if it is UTF-16",
        ),
        (b"a,b", "a.docx", r"the name ends in \.docx; supported are \.txt, \.md, \.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(reading, content, name, message):
    with pytest.raises(DataError, match=rf"a\.\w+(, |: ){message}"):
        reading(content, name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_no_name(name, tokenizer):
    with pytest.raises(DataError, match="^' ?': this is no name of a file or of a data set"):
        read(name, tokenizer)


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match="none.txt: there is no such file"):
        read(tmp_path / "none.txt", tokenizer)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="pipe.txt: it is not an ordinary file"):
        read(tmp_path / "pipe.txt", tokenizer)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="folder.txt: it is a folder"):
        read(tmp_path / "folder.txt", tokenizer)


def test_a_tokenizer_without_a_chat_template_is_reported(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    with pytest.raises(DataError, match="line 1: the model's tokenizer has no chat template"):
        read(path, tokenizer)


@pytest.mark.parametrize("length, seq_len", [(10, 4), (11, 4), (4, 4), (5, 4), (9, 2)])
def test_long_text_is_cut_so_that_every_token_is_predicted_once(length, seq_len):
    text = Document(list(range(length)), [True] * length, True)
    pieces = cut([text], seq_len).documents
    assert [token for piece in pieces for token in piece.ids[1:]] == list(range(1, length))
    assert all(2 <= len(piece) <= seq_len for piece in pieces)
    assert sum(piece.targets for piece in pieces) == text.targets


def test_a_long_row_loses_its_end_and_one_with_too_long_a_prompt_is_rejected():
    row = Document(list(range(10)), [False] * 6 + [True] * 4, place=RowPlace("f.jsonl", 7))
    result = cut([row], 8)
    assert (result.shortened, result.documents[0].targets) == (1, 2)
    with pytest.raises(
        DataError, match="f.jsonl, line 7: 6 tokens come before the first trained one, and --seq-len is 6"
    ):
        cut([row], 6)
