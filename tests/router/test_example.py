"""examples/omnimoe_lm.py, run as a user runs it, with small sizes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.sweep(3, part=1)

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--dim", "16", "--heads", "2", "--layers", "2", "--seq", "16", "--batch", "2", "--experts", "64", "--k", "4")


def run(*args):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "omnimoe_lm.py"), *SMALL, "--device", "cpu", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 80)
    return path


def trained(text, folder, *args):
    files = ("--json", str(folder / "lm.json"), "--plot", str(folder / "lm.svg"))
    process = run("--data", str(text), *files, *args)
    assert process.returncode == 0, process.stderr
    assert "on cpu, 1 thread\n" in process.stdout, "small products are slower with more threads"
    assert re.search(r"^dense: step (\d+) of \1, loss \d\.\d{4}$", process.stderr, re.MULTILINE), process.stderr
    return process.stdout, json.loads((folder / "lm.json").read_text()), (folder / "lm.svg").read_text()


def test_two_runs_with_one_seed_print_the_same_digits_and_learn(text, tmp_path):
    first, second = (trained(text, tmp_path, "--steps", "60") for _ in range(2))
    for name in ("omnimoe", "dense"):
        a, b = (result["runs"][name] for _, result, _ in (first, second))
        assert a["loss"] == b["loss"] and a["held_out"] == b["held_out"] and a["usage"] == b["usage"]
        assert a["held_out"] < first[1]["unigram"] - 0.3 < first[1]["unigram"]
    runs = first[1]["runs"]
    # rows of 16 numbers: router 2 * 8, shared expert 3 * 16, selected experts 2 * 4; the dense SwiGLU has 3 * 24
    assert runs["omnimoe"]["active"] == (16 + 48 + 8) * 16 and runs["dense"]["active"] == 3 * 24 * 16
    assert len(runs["omnimoe"]["usage"][-1]["layers"]) == 2 and runs["dense"]["usage"] == []
    assert "nats below the unigram entropy" in first[0] and "experts minus dense" in first[0]
    assert len(ElementTree.fromstring(first[2]).findall(".//{http://www.w3.org/2000/svg}polyline")) == 2 + 2 + 2


def test_other_layers_and_norms_also_train(text, tmp_path):
    out, result, _ = trained(text, tmp_path, "--steps", "4", "--layer", "peer", "--balance", "0.01", "--norm", "batch")
    assert len(result["runs"]["peer"]["loss"]) == 4 and "peer, up to step 4" in out
    assert 0 < result["runs"]["peer"]["usage"][-1]["layers"][0]["share_used"] <= 1


def test_norms_none_and_layer_differ(text, tmp_path):
    losses = [
        trained(text, tmp_path, "--steps", "3", "--norm", n)[1]["runs"]["omnimoe"]["loss"] for n in ("none", "layer")
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--experts 60", "--experts 60: expected a square; the nearest are 49 and 64"),
        ("--k 40 --experts 16", "--k 40: there are only 16 experts"),
        ("--layer peer --k 9", "--k 9: --layer peer has heads of four experts"),
        ("--threads 0", "--threads 0: at least 1 is needed"),
        ("--lr nan", "--lr nan: expected a finite number"),
        ("--device nothing", "'nothing' cannot be used here"),
        ("--seq 4096", "omnimoe_lm: --data has 3520 bytes of text; --seq 4096 needs at least 81940"),
    ],
)
def test_input_that_cannot_be_trained_on_is_reported_in_one_sentence(text, options, sentence, run_example):
    status, err = run_example("--data", str(text), *options.split())
    assert status != 0 and sentence in err and "Traceback" not in err


def test_wrong_options_are_reported_without_a_traceback(run_example):
    status, err = run_example("--data", "nowhere")
    assert status == 2 and "there is no such file" in err


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Runs the example in this process and returns its stderr; process-wide settings are restored."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("omnimoe_lm", ROOT / "examples" / "omnimoe_lm.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory

    def run_in_process(*args):
        with pytest.raises(SystemExit) as end:
            example.main([*SMALL, "--device", "cpu", *args])
        err = capsys.readouterr().err
        if isinstance(end.value.code, str):  # Python prints the message itself and exits with 1
            return 1, end.value.code
        return end.value.code, err

    yield run_in_process
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
