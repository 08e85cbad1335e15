"""`goldsmith bench generate`: whole models from one file, judged against float64, timed in turns."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("gguf", reason="comes with the extra hf")

import torch
from typer.testing import CliRunner

from benchmarks.common import needs
from benchmarks.generate import command, room
from benchmarks.generate.check import Judge
from benchmarks.generate.engines import peers
from benchmarks.generate.engines.arithmetic import Arithmetic
from benchmarks.generate.engines.llama import Llama, NoLlama
from benchmarks.generate.engines.peers import Precision, Setting
from benchmarks.generate.engines.processes import EngineError, EngineProcess
from benchmarks.generate.model import gguf_files
from benchmarks.generate.model.shapes import SHAPES, shape_of
from benchmarks.generate.model.weights import FolderWeights, RandomWeights, names
from benchmarks.generate.rows import GenerateRow
from benchmarks.generate.scratch import scratch
from benchmarks.generate.tables import remarks
from benchmarks.generate.workers.compiled import CompiledEngine
from benchmarks.generate.workers.golden import GoldenEngine
from benchmarks.generate.workers.ours import GoldsmithEngine
from benchmarks.generate.workers.plain import TransformersEngine
from benchmarks.generate.workers.rounding import RandomRounding
from benchmarks.generate.workers.worker import answered
from goldsmith.cli import app
from goldsmith.cli.bench import moved
from goldsmith.core import native
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(native.reason() is not None, reason="needs the native library")
TINY, SHORT = SHAPES["tiny"], ["--prompt", "16", "--tokens", "4", "--rounds", "1", "--commit", "abc1234"]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """As on a machine where Triton's interpreter is off."""
    monkeypatch.setattr(needs, "machine", lambda: SimpleNamespace(interpreter=False, cores=2))


def refusal(*arguments):
    result = CliRunner().invoke(command.app, [*SHORT, *arguments])
    assert result.exit_code == 2
    return " ".join(result.stderr.split())


def written(folder, format, dense, shape=TINY, source=None):
    path = folder / f"{shape.name}-{format}-{dense}.gguf"
    gguf_files.write(path, shape, source or RandomWeights(shape), format, dense)
    return path


def options(path, dtype="float32", **more):
    """What a worker is given."""
    made = []

    class Given:
        def __init__(self, name, words, environment, log):
            made.append(json.loads(words[-1]))

    original, peers.EngineProcess = peers.EngineProcess, Given
    try:
        peers._worker("golden", Setting(1, "cpu", 64), path, TINY, Precision("fp32", "fp32"), path.parent)
    finally:
        peers.EngineProcess = original
    return made[0] | {"dtype": dtype, "budget": "0", "format": "fp32"} | more


class InProcess:
    """An engine in this process, which answers as a worker does."""

    def __init__(self, engine):
        self.engine = engine
        engine.load()

    def ask(self, verb, word="-", ids=()):
        with torch.inference_mode(self.engine.inference):
            return answered(self.engine, verb, str(word), list(ids))


@pytest.mark.sweep(2, part=0)
def test_an_interrupt_keeps_the_finished_rows_and_leaves_no_files(tmp_path):
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "scratch"
    folder.mkdir()
    words = ["--shape", "tiny", "--format", "fp32,bf16", "--against", "none", "--threads", "1"]
    words += ["--json", str(rows), "--folder", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.generate", *SHORT, *words], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 240
    while not (rows.exists() and rows.read_text().endswith("\n")) and child.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    shown, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Interrupted: the rows so far are kept." in errors
    row = json.loads(rows.read_text().splitlines()[0])
    assert (row["engine"], row["verified"], row["sizes"]["layers"]) == ("goldsmith", True, 2)
    assert row["error"] <= 2 * row["honest"] < 1e-5
    assert row["decode"]["median"] > 0 and row["prompt"]["rounds"] == 1 and row["share_of_read"] > 0
    assert row["memory"]["resident"] < 2 * row["memory"]["stated"]
    assert row["parts"].keys() == {"attention with its products", "router", "experts", "head", "between two steps"}
    assert all(seconds > 0 for seconds in row["parts"].values())
    assert row["commit"] == "abc1234" and "scratch" not in row["command"]
    assert "tiny, 2 layers, fp32" in shown and "agrees" in shown
    assert list(folder.iterdir()) == []


def test_temporary_files_go_away_with_a_killed_process(tmp_path):
    text = "import os, signal, sys\nfrom pathlib import Path\nfrom benchmarks.generate.scratch import scratch\n"
    text += "with scratch(Path(sys.argv[1])) as folder:\n    (folder / 'file').write_text('x')\n"
    text += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run([sys.executable, "-c", text, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until = time.monotonic() + 30
    while list(tmp_path.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_file_holds_the_numbers_that_goldsmith_and_the_plain_model_compute_with(tmp_path):
    path = written(tmp_path, "int4", "int8")
    plain = gguf_files.read(path, torch.float64)
    weight = RandomWeights(TINY).tensor("blk.1.ffn_up_exps").double()
    up = plain["model.layers.1.mlp.experts.gate_up_proj"].chunk(2, 1)[1]
    assert 0.05 < float((up - weight).norm() / weight.norm()) < 0.2  # four bits
    judge = Judge(InProcess(GoldenEngine(options(path))), tmp_path, [[1, 2, 3, 4], [9, 8, 7, 6]])
    judge.prepare(Arithmetic())
    ours = InProcess(GoldsmithEngine(options(path, format="int4")))
    try:
        assert judge.judge(ours, Arithmetic()).agrees
    finally:
        ours.engine.close()


def test_the_golden_of_a_dense_part_that_is_packed_anew_has_the_packed_weights(tmp_path):
    engine = GoldenEngine(options(written(tmp_path, "fp32", "fp32")))
    engine.load()
    with torch.inference_mode():
        errors = {}
        for packs in ("int8", "int4"):
            plain, packed = (engine.golden_logits([3, 1, 4], 1, name) for name in ("", packs))
            errors[packs] = float((packed - plain).norm() / plain.norm())
    assert 1e-4 < errors["int8"] < errors["int4"] < 1


def test_only_experts_are_rounded_as_experts_whatever_their_shape():
    expert, dense, x = torch.ones(8, 64), torch.ones(8, 64), torch.linspace(0.1, 1, 64)[None]
    with RandomRounding(Arithmetic("float32", "q8"), {id(expert)}, set(), 0):
        sums = [torch.nn.functional.linear(x, weight) for weight in (dense, expert)]
    assert torch.equal(sums[0], x @ dense.T) and not torch.equal(sums[1], sums[0])


@pytest.mark.parametrize("fault", ["theta", "norm_topk_prob", "num_experts_per_tok"])
def test_a_model_with_another_formula_is_wrong_in_every_arithmetic(tmp_path, fault):
    path = written(tmp_path, "bf16", "bf16")
    judge = Judge(InProcess(GoldenEngine(options(path))), tmp_path, [list(range(16)), list(range(40, 56))])
    wrong = options(path)
    wrong["config"] |= {
        "theta": {"rope_theta": 10.0}, "norm_topk_prob": {"norm_topk_prob": False},
        "num_experts_per_tok": {"num_experts_per_tok": 1},
    }[fault]  # fmt: skip
    right, wrong = InProcess(TransformersEngine(options(path))), InProcess(TransformersEngine(wrong))
    for arithmetic in (Arithmetic(), Arithmetic("bfloat16"), Arithmetic("float32", "q8", "q8", "fp16")):
        judge.prepare(arithmetic)
        assert judge.judge(right, arithmetic).agrees
        assert not judge.judge(wrong, arithmetic).agrees


def test_a_folder_gives_the_weights_that_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = ROOT / "examples" / "shakespeare-moe"
    shape = shape_of(folder)
    assert (shape.layers, shape.E, shape.k, shape.tied) == (4, 16, 2, True)
    numbers = gguf_files.read(written(tmp_path, "fp32", "fp32", shape, FolderWeights(folder, shape)), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    assert numbers.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in numbers.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "--shape huge: there are qwen3-30b, qwen3-235b, small, tiny."),
        (["--format", "q4"], "--format q4: there are int4, int8, bf16, fp32."),
        (["--compute", "wrong"], "--compute wrong: there are auto, exact, int8."),
        (["--compute", "int8", "--format", "bf16"], "--compute int8 is for experts in int8 or int4: --format bf16 has"),
        (["--dense-format", "x"], "--dense-format x: there are int4, int8, bf16, fp32."),
        (["--against", "ollama"], "there are llama.cpp, transformers, kt-kernel, accelerate, torch.compile, and none."),
        (["--against", "llama.cpp"], "llama.cpp cannot run: give --llama PATH: a folder in which llama.cpp was built"),
        (["--llama", "/nowhere"], "llama.cpp cannot run: --llama /nowhere is not a folder"),
        (["--against", "accelerate"], "accelerate cannot run: it splits a model between a GPU and the CPU"),
        (["--model", "/nowhere"], "--model /nowhere is not a folder."),
        (["--model", str(ROOT), "--shape", "tiny"], "--model and --shape both choose the model: give one of them."),
        (["--model", str(ROOT / "docs")], "its config.json cannot be read: No such file or directory."),
        (["--folder", "/nowhere"], "--folder /nowhere: no folder can be made there"),
    ],
)  # fmt: skip
def test_bad_options_are_one_sentence(arguments, message):
    chosen = [] if {"--shape", "--model"} & set(arguments) else ["--shape", "tiny"]
    assert message in refusal(*chosen, *arguments)


def test_a_model_of_another_type_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "its type is 'llama', but the file for llama.cpp can be written for qwen3_moe only." in refusal(
        "--model", str(tmp_path)
    )


def test_fewer_layers_where_memory_is_short_and_a_sentence_where_none_fits(monkeypatch, tmp_path):
    shape, precision = SHAPES["qwen3-30b"], Precision("int4", "int4")
    ours = [peers.goldsmith(Setting(2, "cpu", 576))]
    monkeypatch.setattr(room, "available", lambda: 12 << 30)
    fitted = room.fitted(shape, precision, ours, 576, tmp_path)
    assert 0 < fitted.layers < 48 and fitted.checked <= fitted.layers
    assert f"{fitted.layers} of 48 layers fit (12.0 GiB of memory" in fitted.why
    monkeypatch.setattr(room, "available", lambda: 1 << 30)
    assert "one layer and the vocabulary need" in refusal("--shape", "qwen3-30b", "--against", "none")


def test_a_format_that_a_peer_lacks_is_named_in_its_row():
    setting = Setting(2, "cpu", 576)
    lacks = peers.transformers(setting).lacks
    assert lacks(Precision("bf16", "bf16")) is None
    assert lacks(Precision("int4", "fp32")) == "it has no Q4_0 experts beside a dense part in fp32"
    row = GenerateRow("tiny", TINY.sizes, 2, "int4", "fp32", "transformers", "transformers", note="it has no Q4_0")
    assert list(remarks([row])) == ["transformers: it has no Q4_0."]
    assert peers.beyond("avx2", "AVX = 1 | AVX512 = 1") == "built with AVX-512, the others are held to avx2"
    assert peers.beyond("avx512", "AVX512 = 1") == peers.beyond("avx2", "AVX2 = 1") == ""
    # without the keyword of the loading functions, the dense part is float32, and the row says so
    assert peers.goldsmith(setting).dense(Precision("int4", "int4")) == "fp32"


def test_a_compiled_step_computes_the_plain_model(tmp_path, monkeypatch):
    # "eager" traces the step without graph breaks as inductor does; its code takes a minute to compile
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: compile(step, backend="eager", **options))
    path = written(tmp_path, "int4", "int8")
    compiled = InProcess(CompiledEngine(options(path, format="int4", dense_format="int8")))
    judge = Judge(InProcess(GoldenEngine(options(path))), tmp_path, [[1, 2, 3, 4]])
    arithmetic = Arithmetic(packs="int8")
    judge.prepare(arithmetic)
    try:
        assert judge.judge(compiled, arithmetic).agrees
        plain = InProcess(TransformersEngine(options(path)))
        assert compiled.ask("decode", 3, [5, 6])["ids"] == plain.ask("decode", 3, [5, 6])["ids"]
    finally:
        compiled.engine.close()


def test_an_engine_that_ends_says_why(tmp_path):
    script = "import sys; print('{\"ready\": true}', flush=True); input(); sys.exit('no memory')"
    engine = EngineProcess("other", [sys.executable, "-c", script], {}, tmp_path / "log")
    assert engine.answer() == {"ready": True} and engine.memory()["resident"] > 0
    with pytest.raises(EngineError, match="other ended with status 1: no memory"):
        engine.ask("load")
    engine.close()


def test_llama_is_refused_without_libraries_or_headers(tmp_path):
    with pytest.raises(NoLlama, match=r"has no libllama\.so \(BUILD_SHARED_LIBS=ON\)"):
        Llama.find(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "libllama.so").touch()
    with pytest.raises(NoLlama, match=r"the headers llama\.h and ggml-backend\.h are missing"):
        Llama.find(tmp_path)
    (tmp_path / "include").mkdir()
    for header in ("llama.h", "ggml-backend.h"):
        (tmp_path / "include" / header).write_text("#error another version\n")
    with pytest.raises(NoLlama, match="its runner cannot be compiled: .*another version"):
        Llama.find(tmp_path).compile(tmp_path)


def test_bytes_of_a_token_are_those_of_its_tensors():
    shape = SHAPES["qwen3-30b"]
    dense = sum(torch.Size(sizes).numel() for _, kind, sizes in names(shape) if kind == "dense")
    assert dense == shape.layers * shape.attention + 2 * shape.vocabulary * shape.H
    experts = sum(torch.Size(sizes).numel() for _, kind, sizes in names(shape) if kind == "experts")
    assert shape.layers * shape.experts_bytes("bf16") == 2 * experts
    assert 55 * 2**30 < shape.file_bytes("bf16", "bf16") < 58 * 2**30


def test_bench_generate_runs_in_a_checkout(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(moved, "_run", lambda module, words: started.append((module, list(words))) or 0)
    result = CliRunner().invoke(app, ["bench", "generate", "--shape", "tiny"])
    assert (result.exit_code, started) == (0, [("benchmarks.generate", ["--shape", "tiny"])])
    assert "Deprecation" not in result.stderr
    monkeypatch.setattr(moved, "ROOT", tmp_path)
    result = CliRunner().invoke(app, ["bench", "generate"])
    assert result.exit_code == 2
    assert "run `python -m benchmarks.generate` in a checkout of goldsmith's repository." in " ".join(
        result.stderr.split()
    )


def test_scratch_is_empty_afterwards(tmp_path):
    with scratch(tmp_path) as folder:
        (folder / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_drawn_from_the_rows():
    command = [sys.executable, "scripts/generation.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `python scripts/generation.py`"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A library with llama.cpp's interface whose model counts upwards, and the runner that is compiled against it."""
    source, place = ROOT / "tests" / "cli" / "llama_next", tmp_path_factory.mktemp("llama")
    (place / "include").mkdir()
    for header in source.glob("*.h"):
        (place / "include" / header.name).write_text(header.read_text())
    (place / "lib").mkdir()
    library = ["c++", "-shared", "-fPIC", "-std=c++17", str(source / "llama.cpp"), f"-I{source}"]
    subprocess.run([*library, "-o", str(place / "lib" / "libllama.so")], check=True)
    for name in ("ggml", "ggml-base"):
        (place / "lib" / f"lib{name}.so").symlink_to("libllama.so")
    (place / "llama-config.cmake").write_text("set(LLAMA_BUILD_NUMBER 7)\n")
    installed = Llama.find(place)
    assert (installed.libraries, installed.version) == (place / "lib", "b7")
    return installed.compile(place)


def test_the_runner_of_llama_splits_a_prompt_and_decodes(llama, tmp_path):
    # a context of 30 tokens, at most 8 in a call
    runner = EngineProcess("llama.cpp", [str(llama), "model.gguf", "1", "30", "8", "0", "0"], {}, tmp_path / "log")
    assert runner.answer() == {"ready": True, "system": "none", "note": ""}
    assert runner.ask("prompt", "-", range(20))["seconds"] > 0
    answer = runner.ask("decode", 4, [7, 46])
    assert answer["ids"] == [47, 48, 49, 0, 1] and len(answer["seconds"]) == 4
    runner.ask("logits", tmp_path / "logits", range(10))
    assert np.fromfile(tmp_path / "logits", np.float32).reshape(10, 50).argmax(1).tolist() == list(range(1, 11))
    with pytest.raises(EngineError, match=r"llama\.cpp: llama_decode failed"):
        runner.ask("prompt", "-", range(31))
    runner.close()
    # asked for a GPU, which the library cannot use
    runner = EngineProcess("llama.cpp", [str(llama), "model.gguf", "1", "30", "8", "999", "1"], {}, tmp_path / "log")
    assert runner.answer()["note"] == "built without a backend for GPUs: all of it runs on the CPU"
    runner.close()
