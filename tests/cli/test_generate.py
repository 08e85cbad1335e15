"""`goldsmith generate`: the plain model's text, in whole characters, with figures, and an end that loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from cli.finetune_tools import saved_model, tiny_tokenizer
from goldsmith.cli import app
from goldsmith.cli.generate.checks import stretched
from goldsmith.cli.generate.command import GenerateRun
from goldsmith.hf.offload import generation
from goldsmith.offload import ExpertStore
from offload.whole_models import assert_same_ids
from repo.tree import ROOT

STEPS = 12
SHAKESPEARE = ROOT / "examples" / "shakespeare-moe"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    place = tmp_path_factory.getbasetemp() / "generate-cache"
    monkeypatch.setenv("GOLDSMITH_CACHE", str(place))
    return place


def run(*words, stdin=None):
    fixed = ["--device", "cpu", "--max-new-tokens", str(STEPS)]
    return CliRunner().invoke(app, ["generate", *fixed, *map(str, words)], input=stdin)


def tokens_of(folder, prompt, *words):
    """The tokens of one output."""
    done = run(folder, "--prompt", prompt, "--json", *words)
    assert done.exit_code == 0, done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["text"] == generation.tokenizer_of(folder).decode(output["tokens"], skip_special_tokens=True)
    return output["tokens"]


def test_the_text_is_the_plain_models_and_statistics_go_to_stderr():
    prompt, tokenizer = "**MACBETH**  \nIs this a dagger", generation.tokenizer_of(SHAKESPEARE)
    tokens = tokens_of(SHAKESPEARE, prompt)
    plain = AutoModelForCausalLM.from_pretrained(SHAKESPEARE).eval()
    plain.set_experts_implementation("eager")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert_same_ids(plain, torch.cat((ids, torch.tensor([tokens])), 1), ids, steps=STEPS)
    done = run(SHAKESPEARE, "--prompt", prompt, "--stats")
    assert done.exit_code == 0 and done.stdout == tokenizer.decode(tokens) + "\n", done.stderr
    for words in ("time to first token", "tokens per second", "hit rate", "limiting lane", "of predicted speed"):
        assert words in done.stderr
    assert re.search(r"experts by lane +cpu [1-9]\d*, copied 0, cached 0", done.stderr)


def test_every_page_that_compares_the_text_with_the_plain_models_names_the_ties():
    for page in (ROOT / "README.md", ROOT / "docs" / "offload.md", ROOT / "docs" / "commands.md"):
        sentence = re.search(r"the plain model[^.]*\bties?\b[^.]*", " ".join(page.read_text().split()))
        assert sentence and all(word in sentence[0] for word in ("16 bits", "logits", "router")), page
    done = CliRunner().invoke(app, ["generate", "--help"], terminal_width=200)
    assert re.search(r"the plain model[^.]*\bties?\b[^.]*16 bits", " ".join(done.stdout.split()))


def test_json_is_one_object_and_nothing_else(model):
    done = run(model, "--prompt", "ab", "--prompt", "Rough winds", "--json")
    assert done.exit_code == 0, done.stderr
    content = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and content.keys() == {"outputs", "stats", "explain"}
    assert [o["prompt"] for o in content["outputs"]] == ["ab", "Rough winds"]
    for output in content["outputs"]:
        assert output.keys() == {"prompt", "text", "tokens", "finish_reason"}
        assert 0 < len(output["tokens"]) <= STEPS and output["finish_reason"] in ("stop", "length")
    assert (
        content["stats"]["calls"] > 0 and content["stats"]["time_to_first_token"] > 0 and content["explain"]["budget"]
    )


def test_the_texts_of_a_batch_are_in_order_and_the_same_as_alone(model, tmp_path):
    (tmp_path / "p.txt").write_text("Shall I compare")
    together = run(model, "--prompt", "By chance", "--prompt-file", tmp_path / "p.txt")
    alone = [run(model, "--prompt", prompt).stdout for prompt in ("By chance", "Shall I compare")]
    assert together.stdout == f"--- 1 of 2\n{alone[0]}--- 2 of 2\n{alone[1]}"
    assert run(model, "--prompt-file", "-", stdin="By chance").stdout == alone[0]
    assert run(model, "--prompt", "By chance", "--no-stream").stdout == alone[0]


def test_a_chat_template_is_applied_and_a_seed_repeats_the_samples(model):
    assert tokens_of(model, "hi", "--chat") == tokens_of(model, "<|user|>hi<|end|><|assistant|>")
    draws = ["--temperature", "1.5", "--top-p", "0.95"]
    tokens = [tokens_of(model, "hi", *draws, "--seed", seed) for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_the_store_has_the_requested_path_and_format(model, tmp_path):
    path = tmp_path / "mine.experts"
    done = run(model, "--prompt", "x", "--store", path, "--format", "int8", "--stats")
    assert done.exit_code == 0 and "--format int8 rounds the experts' weights (exact=False)" in done.stderr
    with ExpertStore.open(path, verify="full") as store:
        assert store.format == "int8"
    assert "exact=False" not in run(model, "--prompt", "x").stderr


def test_verify_store_detects_a_damaged_store(model, tmp_path):
    path = tmp_path / "mine.experts"
    sound = run(model, "--prompt", "x", "--store", path, "--verify-store")
    assert sound.exit_code == 0, sound.stderr
    with ExpertStore.open(path) as store:
        middle = store.nbytes // 2
    with open(path, "r+b") as file:
        file.seek(middle)
        file.write(bytes(8192))
    assert run(model, "--prompt", "x", "--store", path).exit_code == 0  # nobody looked, as docs/offload.md says
    done = run(model, "--prompt", "x", "--store", path, "--verify-store")
    output = " ".join(done.stderr.split())
    assert done.exit_code == 2 and not done.stdout and "do not match their checksum" in output and "layer" in output


def test_a_trace_and_a_profile_are_written_and_the_profile_is_read(model, tmp_path):
    done = run(model, "--prompt", "x", "--trace", tmp_path / "t.json", "--profile", tmp_path / "p.json")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "p.json").read_text())["counts"]
    done = run(model, "--prompt", "x", "--cache", "static", "--profile", tmp_path / "p.json")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("how", ["text", "json"])
def test_ctrl_c_keeps_the_text_so_far_and_the_store(model, how, monkeypatch, cache):
    whole = json.loads(run(model, "--prompt", "Rough", "--json").stdout)["outputs"][0]
    put = generation.RowStreamer.put

    def interrupted(rows, value):
        put(rows, value)
        if len(rows._generation.outputs[0].tokens) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generation.RowStreamer, "put", interrupted)
    done = run(model, "--prompt", "Rough", "--stats", *(["--json"] if how == "json" else []))
    assert done.exit_code == 130 and "Interrupted." in done.stderr and "tokens per second" in done.stderr
    if how == "json":
        (output,) = json.loads(done.stdout)["outputs"]
        assert output["tokens"] == whole["tokens"][:4] and output["finish_reason"] == "interrupted"
    else:
        assert whole["text"].startswith(done.stdout[:-1].rstrip("\N{REPLACEMENT CHARACTER}"))
    for path in (cache / "stores").iterdir():
        ExpertStore.open(path, verify="full").close()


def test_ctrl_c_while_the_store_is_built_leaves_none(model, monkeypatch, tmp_path):
    from goldsmith.cli.generate import display

    monkeypatch.setattr(display.ProgressLines, "update", lambda *progress: signal.raise_signal(signal.SIGINT))
    done = run(model, "--prompt", "x", "--store", tmp_path / "s")
    assert done.exit_code == 130 and "before there was any result" in done.stderr and not done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_the_reader_of_the_text_may_close_the_pipe(model, monkeypatch):
    from goldsmith.cli.generate import display

    def gone(page, piece):
        raise BrokenPipeError

    monkeypatch.setattr(display.BatchText, "_write", gone)
    done = run(model, "--prompt", "x")
    assert done.exit_code == 0 and len(done.stderr.splitlines()) == 1


def test_a_nan_ends_with_its_report_and_exit_1(model, tmp_path):
    folder = saved_model(tmp_path / "bad")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][tiny_tokenizer()("x").input_ids[0]] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    done = run(folder, "--prompt", "abxa")
    assert done.exit_code == 1 and "NaN in layer 0, stage 'input'" in done.stderr
    result = run(folder, "--prompt", "abxa", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"]["stage"] == "input"
    warned = run(folder, "--prompt", "abxa", "--guard", "off")
    assert warned.exit_code == 0


def test_pieces_are_whole_characters_even_if_tokens_split_them():
    tokenizer, message = tiny_tokenizer(), "naïve — 日本語 🙂 ok"
    ids = tokenizer(message).input_ids
    for start in (0, 4):
        rows = generation.IncrementalText(tokenizer, ids[:start])
        pieces = [rows.add(token) for token in ids[start:]]
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert tokenizer.decode(ids[:start]) + "".join(pieces) + rows.end() == message
    rows = generation.IncrementalText(tokenizer, [])
    half = tokenizer("🙂").input_ids[:2]
    assert "".join(map(rows.add, half)) == "" and rows.end() == "\N{REPLACEMENT CHARACTER}"


WRONG = [
    (["--top-k", "3"], "--top-k needs a temperature above 0"),
    (["--temperature", "1", "--top-p", "1.5"], "--top-p is 1.5; expected a share above 0 and at most 1"),
    (["--prefill", "soon"], "--prefill is soon; expected auto, cpu, stream, split or a number of tokens"),
    (["--cache", "static"], "give --profile FILE"),
    (["--json", "--stream"], "leave out --stream"),
    (["--device", "abacus"], "abacus"),
    (["--prompt-file", "nosuch"], "--prompt-file nosuch cannot be read: No such file"),
    (["--store", "nosuch/folder/s"], "nosuch/folder"),
    (["--budget", "lots"], "--budget 'lots' is not an amount of memory"),
    (["--trace", "nosuch/t.json"], "--trace nosuch/t.json cannot be written: there is no folder nosuch"),
    (["--trace", "."], "--trace . cannot be written: it is a folder"),
    (["--prefill", "0"], "--prefill is 0; expected at least 1 token, or auto"),
    (["--profile", "nosuch/p.json"], "--profile nosuch/p.json cannot be written: there is no folder nosuch"),
    (["--cache", "static", "--profile", "nosuch.json"], "--profile nosuch.json cannot be read: No such file"),
    (
        ["--cache", "static", "--profile", __file__],
        "test_generate.py is not a profile: give a file that --profile wrote",
    ),
    (["--threads", "9999"], "--threads 9999, expected a number from 1 to 1024"),
    (["--device", "meta"], "--device 'meta': experts are computed only on 'cpu' and 'cuda'"),
    (["--store", "."], "--store .: path is a folder, expected a store's file"),
    (["--seed", "9" * 23], "expected a whole number from -2^63 to 2^64 - 1"),
    (["--budget", "9" * 400], f"--budget '{'9' * 40}...' is not an amount of memory"),
    (["--prompt", "\udcff\udcfe"], r"--prompt '\udcff\udcfe' cannot be read: it is not UTF-8 text."),
    (["--temperature", "inf"], "--temperature is inf; expected a finite number"),
]


@pytest.mark.parametrize("words, message", WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_request_that_cannot_run_is_one_paragraph_and_exit_2(model, words, message):
    done = run(model, "--prompt", "x", *words)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split()) and not done.stdout, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "MODEL", "Errno"))


def test_a_store_that_cannot_be_used_is_reported_with_a_remedy(model, tmp_path):
    def error_of(store):
        done = run(model, "--prompt", "x", "--max-new-tokens", "1", "--store", str(store))
        assert done.exit_code == 2 and not done.stdout
        return " ".join(done.stderr.partition("\n")[2].split())

    sound, other = tmp_path / "sound", tmp_path / "other"
    assert run(model, "--prompt", "x", "--max-new-tokens", "1", "--store", str(sound)).exit_code == 0
    content = sound.read_bytes()
    other.write_bytes(content[:-100])
    assert re.fullmatch(
        r"--store \S+/other is damaged: .*truncated.* Delete it: the next run builds a new one\.", error_of(other)
    )
    other.write_bytes(content[:8] + bytes([content[8] + 1]) + content[9:])
    assert "other has file version 2, but this goldsmith reads version 1" in error_of(
        other
    ) and "Delete" not in error_of(other)
    done = run(model, "--prompt", "x", "--format", "int8", "--store", str(sound))
    assert done.exit_code == 2 and "sound is not a store of these weights: --format 'int8', but " in (
        " ".join(done.stderr.split())
    )
    assert sound.read_bytes() == content


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_output_files_are_checked_before_the_run(model, tmp_path):
    tmp_path.chmod(0o500)
    done = run(model, "--prompt", "x", "--profile", str(tmp_path / "p.json"))
    assert done.exit_code == 2 and "is not writable" in " ".join(done.stderr.split()) and not done.stdout


def test_a_warning_of_goldsmith_is_printed_as_one_line(model, monkeypatch):
    from goldsmith.offload import attach

    make = attach.from_pretrained

    def warning(*arguments, **options):
        warnings.warn("offload.calibrate: what was measured could not be kept", RuntimeWarning, stacklevel=2)
        return make(*arguments, **options)

    monkeypatch.setattr(attach, "from_pretrained", warning)
    done = run(model, "--prompt", "x", "--max-new-tokens", "1")
    assert done.exit_code == 0 and done.stderr.splitlines()[1:] == ["what was measured could not be kept"]


def test_the_length_of_a_prompt_is_checked_before_it_runs(model):
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    done = run(model, "--prompt", "long " * (most + 1))
    output = " ".join(done.stderr.split())
    assert done.exit_code == 2 and not done.stdout
    assert re.search(rf"A prompt has [\d,]+ tokens, but the model supports at most {most:,} ", output), output
    assert stretched(SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    assert not stretched(AutoConfig.from_pretrained(model))
    output = []
    arguments = SimpleNamespace(max_new_tokens=most, dense_format="exact", compute="exact")
    command = GenerateRun(arguments, [], {}, SimpleNamespace(note=output.append))
    shape = SimpleNamespace(config=AutoConfig.from_pretrained(model))
    offloaded = SimpleNamespace(model=shape, engine=SimpleNamespace(store=SimpleNamespace(exact=True)))
    command._warn_about_differences(offloaded, 1)
    assert output[-1].startswith("A prompt has 1 token: ")


def test_a_folder_that_cannot_be_used_is_one_paragraph_and_exit_2(model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model / name)
    for folder, message in (
        ("nosuch", "nosuch is not a folder here"),
        (tmp_path, "no config.json"),
        (bare, "has no tokenizer"),
    ):
        done = run(folder, "--prompt", "x")
        assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.stderr
    done = run(model)
    assert done.exit_code == 2 and "give --prompt TEXT" in " ".join(done.stderr.split())


def test_from_the_shell_no_token_is_computed_twice():
    """That keeps it below 10 s, with all imports, which `python -m benchmarks.promises generate` measures."""
    words = ["generate", str(SHAKESPEARE), "--device", "cpu", "--prompt", "O", "--max-new-tokens", "24", "--json"]
    done = subprocess.run([sys.executable, "-m", "goldsmith", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config, answer = AutoConfig.from_pretrained(SHAKESPEARE), json.loads(done.stdout)
    (output,), stats = answer["outputs"], answer["stats"]
    assert output["text"].strip() and len(output["tokens"]) == 24
    assert stats["calls"] == stats["tokens"] == 24 * config.num_hidden_layers
    assert stats["experts_cpu"] == config.num_experts_per_tok * stats["tokens"]


def test_memory_is_reserved_for_all_prompts_and_a_full_gpu_is_one_paragraph(model, monkeypatch):
    arguments = {}

    def full(place, **options):
        arguments.update(options)
        raise MemoryError("offload.Engine: cuda:0 ran out of memory in a call of 9 tokens")

    monkeypatch.setattr("goldsmith.offload.attach.from_pretrained", full)
    done = run(model, "--prompt", "to be", "--prompt", "or not")
    output = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "fewer prompts" in output and "ran out of memory in a call of 9 tokens" in output
    assert arguments["batch"] == 2 and arguments["max_length"] > STEPS


needs_a_full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@needs_a_full_disk
@pytest.mark.parametrize("option", ["--trace", "--profile"])
def test_a_full_disk_at_the_end_loses_no_text(model, option):
    done = run(model, "--prompt", "By chance", "--json", option, "/dev/full")
    assert done.exit_code == 2
    first, _, rest = done.stderr.partition("\n")
    assert first.startswith("Loading torch")
    assert rest.split() == f"{option} /dev/full could not be written: No space left on device.".split()
    assert len(json.loads(done.stdout)["outputs"][0]["tokens"]) == STEPS


@pytest.mark.sweep(4)
@needs_a_full_disk
@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    "where, message",
    [(">/dev/full", "stdout cannot be written to: No space left on device."), (">&-", "stdout is closed")],
    ids=["full", "closed"],
)
def test_a_stdout_that_cannot_be_written_is_reported_in_a_sentence(model, words, where, message):
    line = [sys.executable, "-m", "goldsmith.cli", "generate", str(model), "--prompt", "By", "--max-new-tokens", "1"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {where}', "sh", *line, *words, "--device", "cpu"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 2


def test_a_prompt_from_stdin_that_is_not_text_is_reported_like_a_file(model, tmp_path):
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    for name, stdin in (("-", b"\xff\xfe"), (tmp_path / "prompt", None)):
        done = run(model, "--prompt-file", name, stdin=stdin)
        assert done.exit_code == 2
        assert " ".join(done.stderr.split()) == f"--prompt-file {name} cannot be read: it is not UTF-8 text."


def test_formats_of_the_dense_part_and_integer_products_are_said_and_refused():
    done = run(SHAKESPEARE, "--prompt", "A", "--format", "int4_asym", "--dense-format", "int8", "--compute", "int8")
    notes = " ".join(done.stderr.split())
    assert done.exit_code == 0, notes
    assert "--dense-format int8 rounds the weights of the other linear layers" in notes and "--compute int8" in notes
    done = run(SHAKESPEARE, "--prompt", "A", "--compute", "int8")
    assert done.exit_code == 2
    assert "is for experts in int8, int4 or int4_asym, not in bf16" in " ".join(done.stderr.split())
