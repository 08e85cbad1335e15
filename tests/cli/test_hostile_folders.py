"""Folders whose files have wrong values: each fault is a ValueError of one sentence, whatever a reader raises."""

import json
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from transformers.models.qwen3_moe import modeling_qwen3_moe
from typer.testing import CliRunner

import goldsmith
from cli.finetune_tools import VERSE, saved_model, tiny_model
from goldsmith.cli import app
from goldsmith.core.json_values import parse_json
from goldsmith.core.messages import about, sentence
from goldsmith.hf.checkpoint.foreign_errors import brief, of_the_model
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.hf.model_class import config_of, empty_model
from goldsmith.hf.offload.generation import tokenizer_of
from goldsmith.hf.training.errors import TrainingError
from goldsmith.hf.training.model import loading
from goldsmith.hf.training.options import Options
from goldsmith.hf.training.records import checkpoints, journal
from goldsmith.offload import attach

NESTED = "[" * 100_000 + "]" * 100_000
WRONG = [None, -1, 0, "x", 10**9, [], {}, 1.5, True]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model") / "model")


def spoiled(folder, place, name, text):
    """A folder of links to the model's files, but for one."""
    place.mkdir()
    for path in folder.iterdir():
        if path.name != name:
            (place / path.name).symlink_to(path)
    (place / name).write_text(text)
    return place


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_in_a_config_is_a_value_error_or_makes_a_model(folder, value, tmp_path):
    """One value of every key. None of them builds layers without end, or computes with sizes of billions."""
    content = json.loads((folder / "config.json").read_text())
    refused = 0
    for key in content:
        place = spoiled(folder, tmp_path / key, "config.json", json.dumps(content | {key: value}))
        try:
            model = empty_model(config_of(place), torch.float32)
            for _, module in experts_modules(model):
                spec_of(module)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 600
    assert refused >= 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000; at most 10,000 are supported"),
        ({"num_experts_per_tok": 10**9}, r"num_experts_per_tok is 1,000,000,000, but the model has \d experts"),
        ({"hidden_size": 0}, "has 0 inputs; 1 to 4,194,304 are supported"),
        ({"num_attention_heads": 0}, "can be made of the values in config.json: ZeroDivisionError: "),
        ({"attention_bias": 3}, "config.json: model_type 'qwen3_moe' cannot be read: Validation error for field 'att"),
        ({"dtype": {}}, "config.json: dtype is {}, expected the name of one of torch's dtypes"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(folder, changes, message, tmp_path):
    content = json.loads((folder / "config.json").read_text()) | changes
    place = spoiled(folder, tmp_path / "model", "config.json", json.dumps(content))
    with pytest.raises(ValueError, match=message):
        attach.from_pretrained(place, device="cpu")
    if "dtype" not in changes:  # finetune chooses the dtype itself
        with pytest.raises(TrainingError, match=f"MODEL {place}: .*{message}"):
            loading.load(Options(model=str(place), data="verse.txt", output="out"))


@pytest.mark.parametrize("text", [NESTED, "[]", "{", "3"], ids=["nested", "list", "open", "number"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_json_that_is_no_such_file_is_a_value_error(folder, name, text, tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    place = spoiled(folder, tmp_path / "model", name, text)
    try:
        tokenizer_of(place)
        attach.from_pretrained(place, device="cpu", threads=1).close()
    except ValueError as error:
        assert str(error).startswith(str(place)) and "\n" not in str(error)
    else:
        pytest.fail(f"{name} was read")


def test_a_missing_tokenizer_is_named_by_its_file(folder, tmp_path):
    place = spoiled(folder, tmp_path / "model", "tokenizer.json", "")
    (place / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="model has no tokenizer: tokenizer.json is missing$"):
        tokenizer_of(place)


def test_nested_files_of_a_run_are_damage_like_any_other(tmp_path):
    checkpoint = checkpoints.write(tmp_path, 3, {"a": torch.zeros(2)}, {"identity": {}, "circumstances": {}})
    (checkpoint / checkpoints.FACTS).write_text(NESTED)
    with pytest.raises(TrainingError, match=r"state.json .* damaged \(it is nested too deeply\)"):
        checkpoints.read(checkpoint)
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{NESTED}\n')
    assert journal.rows(tmp_path / "log.jsonl") == [{"step": 1}]


def test_only_one_function_reads_json():
    """json.loads raises RecursionError for nested text, which a reader of a file forgets to expect."""
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(NESTED)
    package = Path(goldsmith.__file__).parent
    apart = ("assay", "pytest_plugin.py", "pytest_session.py")  # these import nothing else of goldsmith
    files = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in apart]
    readers = [path.name for path in files if "json.loads(" in path.read_text() or "json.load(" in path.read_text()]
    assert readers == ["json_values.py"]


def test_a_config_whose_model_cannot_compute_is_one_sentence_and_leaves_nothing(folder, tmp_path, monkeypatch):
    """The model can be made, but its own forward fails in transformers."""
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "verse.txt").write_text(VERSE)

    def broken(*args, **kwargs):
        raise IndexError("index 3 is out of range")

    broken = types.FunctionType(broken.__code__, modeling_qwen3_moe.__dict__)  # a function of that module
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeAttention, "forward", broken)
    commands = [
        ["generate", folder, "--prompt", "Shall I", "--device", "cpu"],
        ["finetune", folder, "--data", tmp_path / "verse.txt", "--output", tmp_path / "new" / "out"],
    ]
    for command in commands:
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert result.exit_code == 2, result.exception
        text = " ".join(result.stderr.split())
        assert f"MODEL {folder}: its code in transformers cannot compute with the values in config.json" in text
        assert "IndexError: index 3 is out of range." in text
    assert not (tmp_path / "new").exists()


def test_an_error_of_our_own_code_below_the_model_stays_as_it_is():
    def ours():
        parse_json(None)

    called = types.FunctionType((lambda f: f()).__code__, modeling_qwen3_moe.__dict__)
    with pytest.raises(TypeError), of_the_model():
        called(ours)
    with pytest.raises(MemoryError), of_the_model():
        called(types.FunctionType((lambda: bytearray(2**62)).__code__, modeling_qwen3_moe.__dict__))


def test_a_tokenizer_of_another_model_is_named_before_the_first_token(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folder = saved_model(tmp_path / "model")
    tiny_model(vocabulary=100).save_pretrained(folder)
    result = CliRunner().invoke(app, ["generate", str(folder), "--prompt", "\u00ff", "--device", "cpu"])
    assert result.exit_code == 2, result.exception
    assert "but its embedding table has only 100 rows" in " ".join(result.stderr.split())


# sentences


def test_a_sentence_has_options_for_keywords_and_no_function():
    error = ValueError("goldsmith.hf.convert: format='bf16' takes no group_size,\n  got group_size=7")
    assert sentence(error, ("format", "group_size")) == "--format 'bf16' takes no group_size, got --group-size 7."
    assert sentence(OSError(28, "No space left on device", "/x/y")) == "/x/y: No space left on device."
    assert sentence(ValueError("")) == "ValueError."


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/m/config.json: bad", "MODEL /m: config.json: bad"),
        ("/m has no config.json", "MODEL /m has no config.json"),
        ("/m: bad", "MODEL /m: bad"),
        ("/mother: bad", "MODEL /m: /mother: bad"),
        ("--rank 3 is bad", "--rank 3 is bad"),
    ],
)
def test_a_message_names_a_folder_once(text, expected):
    assert about("MODEL", "/m", text) == expected


def test_a_foreign_message_is_one_paragraph_and_names_a_class_that_says_more():
    assert brief(ValueError("a\n  b\n\nc")) == "a b"
    assert brief(ZeroDivisionError("modulo by zero")) == "ZeroDivisionError: modulo by zero"
    assert brief(KeyError("x")) == "KeyError: 'x'"
    assert brief(RuntimeError("y" * 400)) == "y" * 300 + "..."
