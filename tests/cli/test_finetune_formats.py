"""The formats of rows and of files: the same tokens and masks as TRL's, from JSON lines, tables, folders and names."""

import builtins
import json
import logging
import shutil
from logging.handlers import QueueHandler
from queue import SimpleQueue
from types import SimpleNamespace

import pyarrow.parquet
import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
datasets = pytest.importorskip("datasets", reason="comes with the extra train")
pytest.importorskip("trl", reason="comes with the extra train")

from cli.finetune_tools import CHAT, tiny_tokenizer
from goldsmith.hf.training.data import formats
from goldsmith.hf.training.data.documents import read
from goldsmith.hf.training.data.sources import checksum, shown, sources
from goldsmith.hf.training.errors import DataError, MissingPackage

TOOLS = (  # marks answers, so that transformers and TRL can also find them
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TURNS = [("user", "Rain?"), ("assistant", "No."), ("user", "Snow?"), ("assistant", "Yes!")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
CALLING = [
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "none"},
    {"role": "assistant", "content": "No."},
]
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": content} for role, content in TURNS]
PAIRS = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "", "completion": "007 is NA"}]


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TOOLS
    return made


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The folder in which `datasets` keeps what it has read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield datasets.config.HF_DATASETS_CACHE


@pytest.fixture
def reading(tmp_path, tokenizer):
    def reading(rows, name="data.jsonl", tokenizer=tokenizer, **options):
        return read(written(tmp_path / name, rows), tokenizer, **options)

    return reading


def written(path, rows):
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return path


def tokens(documents):
    return [(document.ids, document.trained) for document in documents]


def texts(documents, tokenizer):
    """For each document the text that is trained on, and the whole text."""
    return [
        (tokenizer.decode([t for t, counts in zip(d.ids, d.trained) if counts]), tokenizer.decode(d.ids))
        for d in documents
    ]


def of_trl(rows, tokenizer):
    """Tokens and masks as TRL's SFTTrainer prepares them."""
    from trl import SFTTrainer

    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    arguments = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss="messages" in rows[0] or "conversations" in rows[0],
        max_length=None,
        shuffle_dataset=False,
    )
    data = datasets.Dataset.from_list(json.loads(json.dumps(rows)), on_mixed_types="use_json")
    prepared = SFTTrainer._prepare_dataset(trainer, data, tokenizer, arguments, False, None, "train")
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in prepared]


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "Rain."}, {"text": "Snow, and more."}],
        PAIRS,
        [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}],
        [{"messages": CALLING, "tools": [TOOL]}],
        [{"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}],
        [{"prompt": CALLING[:1], "completion": CALLING[1:], "tools": json.dumps([TOOL])}],
    ],
    ids=["text", "prompt and completion", "messages", "tools", "in messages", "calls in a completion"],
)
def test_tokens_and_masks_are_those_of_trl(reading, tokenizer, rows):
    assert tokens(reading(rows)) == of_trl(rows, tokenizer)


def test_sharegpt_and_alpaca_give_the_tokens_of_the_same_conversation_in_messages(reading):
    said = tokens(reading([{"messages": MESSAGES}]))
    assert tokens(reading([{"conversations": SHAREGPT}])) == said
    assert tokens(reading([{"conversations": MESSAGES}])) == said
    briefed = tokens(reading([{"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]}]))
    assert tokens(reading([{"conversations": SHAREGPT, "system": "Be brief."}])) == briefed
    calls = [{"from": "human", "value": "Rain in Oslo?"}]
    calls += [
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "none"},
    ]
    rows = [{"conversations": [*calls, {"from": "gpt", "value": "No."}], "tools": json.dumps([TOOL])}]
    assert tokens(reading(rows)) == tokens(reading([{"messages": CALLING, "tools": [TOOL]}]))

    asked = [{"role": "user", "content": "Translate\n\nhus"}, {"role": "assistant", "content": "house"}]
    alpaca = {"instruction": "Translate", "input": "hus", "output": "house"}
    assert tokens(reading([alpaca])) == tokens(reading([{"messages": asked}]))


def test_alpaca_without_a_chat_template_has_the_original_prompt(reading):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    rows = [{"instruction": "Add 1", "input": "2", "output": "3"}, {"instruction": "Sing", "input": "", "output": "la"}]
    (first, whole), (second, short) = texts(reading(rows, tokenizer=tokenizer), tokenizer)
    assert (first, second) == ("3<|end|>", "la<|end|>")
    assert whole.startswith("Below is an instruction that describes a task, paired with an input that provides further")
    assert whole.endswith("\n\n### Instruction:\nAdd 1\n\n### Input:\n2\n\n### Response:\n3<|end|>")
    assert short.endswith("the request.\n\n### Instruction:\nSing\n\n### Response:\nla<|end|>")


def test_content_parts_arguments_as_text_and_nulls_are_brought_into_one_form(reading):
    parts = [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}]
    in_parts = [{"role": "user", "content": parts}, *MESSAGES[1:]]
    assert tokens(reading([{"messages": in_parts}])) == tokens(reading([{"messages": MESSAGES}]))
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}, "id": None}
    quoted = [CALLING[0], {"role": "assistant", "tool_calls": [call]}, *CALLING[2:]]
    assert tokens(reading([{"messages": quoted}])) == tokens(reading([{"messages": CALLING}]))
    nulls = [{**turn, "tool_calls": None, "name": None} for turn in MESSAGES]
    assert tokens(reading([{"messages": nulls}])) == tokens(reading([{"messages": MESSAGES}]))


def test_a_row_with_messages_and_a_prompt_column_is_read_as_messages(reading):
    assert tokens(reading([{"prompt": "Rain?", "messages": MESSAGES}])) == tokens(reading([{"messages": MESSAGES}]))


def test_every_kind_of_file_gives_the_same_documents(tmp_path, tokenizer):
    chats = [{"messages": MESSAGES}, {"messages": CALLING}, {"messages": MESSAGES[:2]}]
    for rows, kinds in ((PAIRS, ("json", "lines", "csv", "parquet")), (chats, ("json", "lines", "parquet"))):
        expected = tokens(read(written(tmp_path / "a.jsonl", rows), tokenizer))
        table = datasets.Dataset.from_list(json.loads(json.dumps(rows)), on_mixed_types="use_json")
        for kind in kinds:
            path = tmp_path / f"{kind}{len(rows)}.{'json' if kind == 'lines' else kind}"
            if kind in ("csv", "parquet"):
                getattr(table, f"to_{kind}")(path)
            else:
                written(path, json.dumps(rows, indent=1) if kind == "json" else rows)
            assert tokens(read(path, tokenizer)) == expected, kind


def test_folders_saved_data_sets_and_names_are_read_with_their_splits(tmp_path, tokenizer, cache):
    expected = tokens(read(written(tmp_path / "a.jsonl", PAIRS), tokenizer))
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder / "train.jsonl", PAIRS)
    written(folder / "test.jsonl", PAIRS[:1])
    assert tokens(read(folder, tokenizer)) == expected
    assert tokens(read(f"{folder}:test", tokenizer)) == tokens(read(f"{folder}:train[:1]", tokenizer)) == expected[:1]
    with pytest.raises(DataError, match=r"it has no split tset, but train, test; give one, as in .*folder:train"):
        read(f"{folder}:tset", tokenizer)

    data = datasets.Dataset.from_list(PAIRS)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"only": data}).save_to_disk(tmp_path / "saved splits")
    assert tokens(read(tmp_path / "saved", tokenizer)) == tokens(read(tmp_path / "saved splits", tokenizer)) == expected
    assert checksum(sources(tmp_path / "saved")) == checksum(sources(tmp_path / "saved splits:only"))


def test_a_name_is_read_from_the_copy_on_this_disk(tmp_path, tokenizer, cache):
    """As `datasets` keeps a data set of the hub: ORG___NAME/CONFIGURATION/VERSION/HASH."""
    data = datasets.load_dataset("json", data_files=str(written(tmp_path / "a.jsonl", PAIRS)), split="train")
    (file,) = data.cache_files
    source = file["filename"].rpartition("/")[0]
    place = cache / "someone___sums" / "default" / "0.0.0" / ("0" * 40)
    shutil.copytree(source, place)
    (place / "json-train.arrow").rename(place / "sums-train.arrow")
    facts = json.loads((place / "dataset_info.json").read_text())
    facts |= {"dataset_name": "sums", "builder_name": "json", "config_name": "default"}
    (place / "dataset_info.json").write_text(json.dumps(facts))
    assert len(read("someone/sums", tokenizer)) == len(PAIRS)
    with pytest.raises(
        DataError, match="no-one/nothing: datasets has no copy of it, and there is no file of this name"
    ):
        read("no-one/nothing", tokenizer)


def test_several_files_and_patterns_are_read_in_order(tmp_path, tokenizer):
    for name, row in zip("abc", [*PAIRS, {"prompt": "x", "completion": "y"}]):
        written(tmp_path / f"{name}.jsonl", [row])
    both = tokens(read([tmp_path / "b.jsonl", tmp_path / "a.jsonl"], tokenizer))
    assert both == tokens(read(tmp_path / "b.jsonl", tokenizer)) + tokens(read(tmp_path / "a.jsonl", tokenizer))
    assert [d.place.source[-7:] for d in read(str(tmp_path / "*.jsonl"), tokenizer)] == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
    ]
    one, more = checksum(sources(tmp_path / "a.jsonl")), checksum(sources(str(tmp_path / "*.jsonl")))
    assert one != more and more != checksum(sources([tmp_path / f"{name}.jsonl" for name in "bac"]))
    assert shown([f"d/{name}.jsonl" for name in "abcd"]) == "a.jsonl, b.jsonl and 2 more"
    with pytest.raises(DataError, match="a.jsonl: it is given twice"):
        sources([tmp_path / "a.jsonl", tmp_path / "*.jsonl"])
    with pytest.raises(DataError, match="no file matches this pattern"):
        sources(str(tmp_path / "*.csv"))


def test_files_of_different_formats_are_refused_and_text_files_go_with_text_rows(tmp_path, tokenizer):
    text, chat = (
        written(tmp_path / "t.jsonl", [{"text": "a b"}]),
        written(tmp_path / "c.jsonl", [{"messages": MESSAGES}]),
    )
    plain = written(tmp_path / "p.txt", "c d")
    assert len(read([text, plain], tokenizer)) == 2
    with pytest.raises(DataError, match=r"c.jsonl, line 1: its rows have messages, and those of .*t.jsonl have text"):
        read([text, chat], tokenizer)


def test_where_the_template_rewrites_earlier_turns_trls_training_template_is_used(reading):
    from trl import chat_template_utils as templates

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = templates.qwen3_chat_template
    thinking = [*MESSAGES[:3], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes!"}]
    ((trained, whole),) = texts(reading([{"messages": thinking}], tokenizer=tokenizer), tokenizer)
    assert whole == tokenizer.apply_chat_template(
        thinking, chat_template=templates.get_training_chat_template(tokenizer), tokenize=False
    )
    assert "hm" in trained and "No." in trained and "Rain" not in trained and "Snow" not in trained


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "a", "answer": "b"}, r"has the keys 'question', 'answer'; a row is {\"text\"}, .*instruction"),
        ({"conversations": []}, "'conversations' is not a list of"),
        (
            {"conversations": [{"from": "bard", "value": "a"}]},
            "'from' of message 1 is bard; known are human, user, gpt",
        ),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, r"'from' of message 1 is \['gpt'\]; known are human"),
        ({"conversations": SHAREGPT[1:]}, r"out of order: message 1 is the assistant's \(gpt\) and comes first"),
        ({"conversations": [*SHAREGPT[:1]] * 2}, r"message 2 is the user's \(human\) and follows one of the user's"),
        (
            {"messages": [*CALLING, *CALLING[:1], *CALLING[2:]]},
            "out of order: message 6 is a tool's and follows one of the",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "'content' of message 1 is null, and it has no 'tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part 1 of message 1 has the type image"),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "the arguments of tool call 1 of message 2 are not JSON",
        ),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"id": 3}]}]},
            "has no function with a 'name'",
        ),
        ({"prompt": MESSAGES[:2], "completion": MESSAGES[3:]}, "last message of 'prompt' has the role assistant"),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[2:]}, "first message of 'completion' has the role user"),
        ({"prompt": MESSAGES[:1], "completion": "No."}, r"'completion' is not a list of \{\"role\", \"content\"\}"),
        ({"messages": MESSAGES, "tools": "{"}, "'tools' is not JSON"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "has tokenize, which the command sets"),
        ({"instruction": "a", "output": None}, "'output' is null; expected text"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_reason(reading, row, message):
    with pytest.raises(DataError, match=rf"data\.jsonl, line 1: .*{message}"):
        reading([row])


def test_a_template_that_drops_tool_calls_or_tools_is_refused(reading):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    with pytest.raises(DataError, match="does not write the tool calls of message 2"):
        reading([{"messages": CALLING}], tokenizer=tokenizer)
    with pytest.raises(DataError, match="does not write the 'tools' of the row; remove them"):
        reading([{"messages": MESSAGES, "tools": [TOOL]}], tokenizer=tokenizer)
    tokenizer.chat_template = CHAT.replace("{{ m.content }}", "{{ m.role + 1 }}")
    with pytest.raises(DataError, match="the chat template cannot format the conversation: can only concatenate"):
        reading([{"messages": CALLING}], tokenizer=tokenizer)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", "", "a.json: the file is empty"),
        ("a.json", "[]", "a.json: it has no rows; at least one document"),
        ("a.csv", "prompt,completion\n", "a.csv: it has no rows; at least one document"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', r"a.json, line 2: not JSON: Expecting ':' delimiter"),
        ("a.json", '{"text": "a"}\n{"text" "b"}\n', r"a.json, line 2: not JSON: Expecting ':' delimiter"),
        ("a.csv", "prompt,completion\na,b\na,b,c\n", "a.csv, line 3: not csv that datasets reads: Expected 2 fields"),
        ("a.csv", "text,text\na,b\n", "a.csv, line 1: two columns have the same name; the columns are 'text', 'text'"),
        ("a.csv", "question,answer\na,b\n", "a.csv, row 1: has the columns 'question', 'answer'; a row is"),
        ("a.csv", 'text\n""\n""\n', "a.csv: nothing in it can be predicted"),
        ("a.parquet", "x", "a.parquet: not parquet that datasets reads: "),
        ("a.json", '[{"text": 3}]', "a.json, row 1: 'text' is a number; expected text"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_clear_error(reading, name, content, message):
    logged = QueueHandler(SimpleQueue())
    logging.getLogger("datasets").addHandler(logged)
    with pytest.raises(DataError, match=message):
        reading(content, name)
    logging.getLogger("datasets").removeHandler(logged)
    assert logged.queue.empty()  # datasets would write its own words for the error


def test_a_data_set_without_rows_is_no_damaged_file(tmp_path, tokenizer):
    """datasets reads parquet in batches of as many rows as there are, and the first of the files that it saved."""
    rows = datasets.Dataset.from_dict({"text": []})
    pyarrow.parquet.write_table(rows.data.table, tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]}), test=rows).save_to_disk(tmp_path / "splits")
    for name, where in (("a.parquet", "a.parquet"), ("saved", "saved"), ("splits:train", "splits/test")):
        with pytest.raises(DataError) as caught:
            read(f"{tmp_path}/{name}", tokenizer)
        assert str(caught.value) == f"{tmp_path}/{where}: it has no rows; at least one document is needed"


def test_a_table_of_another_encoding_is_named_with_its_line(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_bytes(b"text\nfine\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"a.csv, line 3: byte 0xe9 at offset 13 is not UTF-8"):
        read(tmp_path / "a.csv", tokenizer)


def test_without_the_packages_text_and_json_lines_work_and_the_rest_names_the_command(reading, monkeypatch):
    original = builtins.__import__

    def missing(name, *words, **named):
        if name.partition(".")[0] in ("datasets", "trl"):
            raise ImportError(name)
        return original(name, *words, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    for rows in ([{"text": "a b"}], PAIRS, [{"messages": CALLING}], [{"instruction": "a", "output": "b"}]):
        assert reading(rows)
    command = r"which is not installed: pip install 'goldsmith\[train\]'"
    with pytest.raises(MissingPackage, match=f"a.csv is read with datasets, {command}"):
        reading("text\na", "a.csv")
    with pytest.raises(MissingPackage, match=f"Rows with 'conversations' are read with trl, {command}"):
        reading([{"conversations": SHAREGPT}])
    with pytest.raises(MissingPackage, match=f"that are messages need trl, {command}"):
        reading([{"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]}])


def test_the_known_formats_are_all_named_in_the_message():
    assert all(f'"{name}"' in formats.KNOWN for name in ("text", "completion", "messages", "conversations", "output"))
