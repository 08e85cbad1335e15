"""examples/mhc_lm.py, run as a user runs it: a process of its own, with sizes that take seconds."""

import argparse
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.sweep(3, part=0)

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--dim", "16", "--heads", "2", "--layers", "1", "--seq", "16", "--batch", "2", "--device", "cpu")
RUN_KEYS = {"loss", "val_loss", "params", "tokens_per_s", "peak_bytes"}


def start(*args: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / "mhc_lm.py"), *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*args: str) -> tuple[int, str, str]:
    process = start(*args)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 80)
    (folder / "b.md").write_text("pack my box with five dozen liquor jugs\n" * 80)
    (folder / "picture.png").write_bytes(bytes(256) * 40)
    return folder


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> dict:
    """One small run of everything: both models, two seeds, two inits, JSON and picture."""
    folder = tmp_path_factory.mktemp("trained")
    files = ("--json", str(folder / "lm.json"), "--plot", str(folder / "lm.svg"))
    options = ("--text", str(text), "--steps", "6", "--seeds", "2", "--init", "deepseek", "small", *files)
    code, out, err = run(*SMALL, *options)
    assert code == 0, err
    result = json.loads((folder / "lm.json").read_text())
    return {"out": out, "err": err, "result": result, "svg": (folder / "lm.svg").read_text(), "options": options[:-4]}


def test_the_json_has_both_models_with_one_loss_a_step(trained):
    result = trained["result"]
    for name in ("mhc", "plain"):
        assert result[name].keys() >= RUN_KEYS
        assert len(result[name]["loss"]) == 6
        assert result[name]["val_loss"] == result[name]["val_curve"][-1][1]
        assert result[name]["params"] > 0 and result[name]["tokens_per_s"] > 0 and result[name]["peak_bytes"] > 0
    assert 2.5 < result["unigram_nats"] < 5.6  # of English letters, below that of 256 equally frequent bytes
    assert result["mhc"]["params"] > result["plain"]["params"]


def test_every_seed_and_init_is_among_the_runs(trained):
    runs = [(r["residual"], r["init"], r["seed"]) for r in trained["result"]["runs"]]
    expected = [("mhc", "deepseek", 0), ("mhc", "small", 0), ("plain", None, 0)]
    assert sorted(runs, key=str) == sorted(expected + [(r, i, 1) for r, i, _ in expected], key=str)
    assert trained["result"]["mhc"]["init"] == "deepseek" and trained["result"]["mhc"]["seed"] == 0


def test_the_peak_memory_of_one_training_does_not_include_another(trained):
    """The trainings run one after the other in one process; each has its own figure, and the same for each seed."""
    peaks = {(r["residual"], r["seed"]): r["peak_bytes"] for r in trained["result"]["runs"] if r["init"] != "small"}
    assert peaks["mhc", 0] == peaks["mhc", 1] > peaks["plain", 0] == peaks["plain", 1]
    # parameters, their gradients, and AdamW's two moments, in float32, are there all at once
    assert all(peaks[name, 0] > 4 * 4 * trained["result"][name]["params"] for name in ("mhc", "plain"))


def test_the_peak_is_the_most_bytes_of_tensors_at_a_time(example, monkeypatch):
    def train(args, first, second, stop, tell):
        assert args.steps == 2
        kept = torch.zeros(first)
        torch.ones(second)  # gone at once
        return kept.clone()

    monkeypatch.setattr(example, "train", train)
    assert example.most_bytes(argparse.Namespace(steps=9), 1000, 7000) == 4 * 8000
    assert example.most_bytes(argparse.Namespace(steps=9), 1000, 500) == 4 * 2000


def test_both_models_start_from_the_same_weights(example):
    args = argparse.Namespace(
        dim=16, heads=2, layers=2, seq=8, n=4, recompute=False, device=torch.device("cpu"), steps=1
    )
    shared = []
    for residual in ("mhc", "plain"):
        torch.manual_seed(3)
        model = example.LM(args, residual, "deepseek")
        shared.append([model.embed, model.unembed, model.norm, *(c.layer for c in model.connections)])
        shared[-1] += [c.norm for c in model.connections]
    for one, other in zip(*shared, strict=True):
        pairs = list(zip(one.parameters(), other.parameters(), strict=True))
        assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_progress_table_and_sample_are_printed(trained):
    assert "step 6/6" in trained["err"] and "tokens/s" in trained["err"] and "s left" in trained["err"]
    for word in ("validation", "unigram", "mhc (deepseek)", "plain", "minus plain", "goes on"):
        assert word in trained["out"]


def test_the_picture_is_well_formed_and_names_every_curve(trained):
    root = ElementTree.fromstring(trained["svg"])
    words = " ".join(root.itertext())
    assert "mhc (deepseek)" in words and "mhc (small)" in words and "plain" in words
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 6 and len(root.findall(f"{name}polygon")) == 6


def test_a_second_run_repeats_bit_for_bit(trained, tmp_path):
    code, out, err = run(*SMALL, *trained["options"], "--json", str(tmp_path / "again.json"))
    assert code == 0, err
    again = json.loads((tmp_path / "again.json").read_text())
    for first, second in zip(trained["result"]["runs"], again["runs"], strict=True):
        assert first["loss"] == second["loss"] and first["val_curve"] == second["val_curve"]
    assert out.split("goes on")[1:] == trained["out"].split("goes on")[1:]


def test_recompute_gives_the_same_losses(trained, text, tmp_path):
    options = ("--text", str(text), "--steps", "6", "--residual", "mhc", "--recompute")
    code, _, err = run(*SMALL, *options, "--json", str(tmp_path / "lm.json"))
    assert code == 0, err
    assert json.loads((tmp_path / "lm.json").read_text())["mhc"]["loss"] == trained["result"]["mhc"]["loss"]


def test_ctrl_c_ends_with_the_results_so_far(text, tmp_path):
    file = tmp_path / "lm.json"
    process = start(*SMALL, "--text", str(text), "--steps", "200000", "--residual", "plain", "--json", str(file))
    assert any("step " in line for line in iter(process.stderr.readline, ""))
    try:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err and "plain" in out
    result = json.loads(file.read_text())
    assert result["interrupted"] and 1 <= len(result["plain"]["loss"]) < 200000
    assert result["plain"].keys() >= RUN_KEYS and "mhc" not in result


def test_the_defaults_learn_more_than_the_frequencies_of_bytes_in_half_a_minute(tmp_path):
    """On this project's own text; half a minute on a slow core that does nothing else, which a test cannot ask for."""
    code, _, err = run("--device", "cpu", "--json", str(tmp_path / "lm.json"))
    assert code == 0, err
    result = json.loads((tmp_path / "lm.json").read_text())
    for name in ("mhc", "plain"):
        assert len(result[name]["loss"]) == 60
        last = result[name]["loss"][-10:]  # a single batch's loss is off by 0.2, and the text changes with the project
        assert sum(last) / len(last) < result["unigram_nats"] - 0.1


@pytest.fixture(scope="module")
def twelve(text, tmp_path_factory) -> tuple[Path, dict]:
    """examples/mhc_lm_large.sh at a size of seconds, cut short and called again."""
    folder = tmp_path_factory.mktemp("twelve")
    sizes = "--dim 16 --layers 1 --heads 2 --seq 16 --batch 2 --steps 3".split()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PYTHON": sys.executable, "JOBS": "1"}
    environment |= {"TEXT": str(text), "OUT": str(folder), "DEVICE": "cpu"}

    def command(*more):
        script = ["sh", str(ROOT / "examples" / "mhc_lm_large.sh"), *sizes, *more]
        return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)

    for model, seed in itertools.product(("deepseek", "small", "identity"), (0, 1, 2)):  # as an earlier call left them
        (folder / f"{model}-{seed}.json").write_text(json.dumps(fabricated("mhc", model, seed)))
    (folder / "plain-2.json").write_text(json.dumps(fabricated("plain", None, 2)))
    (folder / "plain-1.json.part").write_text('{"interrupted": true}')
    return folder, {"wrong": command("--lr", "nan"), "first": command(), "second": command()}


def fabricated(residual, init, seed) -> dict:
    own = {"residual": residual, "init": init, "seed": seed, "finished": True, "params": 9, "peak_bytes": 2**30}
    own |= {
        "loss": [5.0, 4.0, 3.0 + seed],
        "val_loss": 3.0 + seed,
        "val_curve": [[2, 4.0], [3, 3.0 + seed]],
        "tokens_per_s": 7.0,
    }
    size = {"dim": 16, "layers": 1, "heads": 2, "n": 4, "seq": 16, "batch": 2, "steps": 3, "lr": 1e-3, "bytes": 6721}
    return {"runs": [own], "unigram_nats": 4.2, "conditions": {**size, "device": "CPU", "torch": "2"}}


def test_an_interrupted_comparison_continues(twelve):
    folder, called = twelve
    assert called["wrong"].returncode != 0 and "--lr nan: a positive number is needed" in called["wrong"].stdout
    assert called["first"].returncode == 0, called["first"].stdout + called["first"].stderr
    steps = [line for line in called["first"].stdout.splitlines() if "already" not in line]
    assert steps == [str(folder / f"plain-{seed}.json") for seed in (0, 1)]
    assert called["second"].stdout.count("is there already") == 12 and called["second"].returncode == 0
    runs = [json.loads(path.read_text())["runs"] for path in sorted(folder.glob("*.json"))]
    assert [len(run) for run in runs] == [1] * 12 and not list(folder.glob("*.part"))
    words = " ".join(ElementTree.fromstring((folder / "curves.svg").read_text()).itertext())
    assert all(name in words for name in ("mhc (deepseek)", "mhc (small)", "mhc (identity)", "plain", "3 seeds"))


def test_results_of_different_sizes_do_not_become_one_picture(tmp_path):
    for dim in (16, 32):
        result = fabricated("plain", None, 0)
        result["conditions"]["dim"] = dim
        (tmp_path / f"{dim}.json").write_text(json.dumps(result))
    curves = [sys.executable, str(ROOT / "examples" / "loss_curves.py")]
    done = subprocess.run([*curves, "16.json", "32.json", "lm.svg"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "lm.svg").exists()
    assert done.stderr == "loss_curves: the results differ in dim: one picture cannot show them\n"


def test_the_page_shows_the_differences_per_seed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import language_model

    monkeypatch.setattr(language_model, "FOLDER", tmp_path)
    assert language_model.losses(table) == "No comparison yet.\n"
    results = [fabricated("plain", None, seed) for seed in (0, 1, 2)]
    for model, shift in (("small", [-0.1, -0.2, -0.3]), ("deepseek", [0.1, 0.2, 0.3]), ("identity", [0.1, -0.2, 0.0])):
        for seed, change in enumerate(shift):
            results.append(fabricated("mhc", model, seed))
            results[-1]["runs"][0]["val_loss"] += change
    kept = language_model.reduced(results, [fabricated("plain", None, 0)])
    (tmp_path / "card.json").write_text(json.dumps(kept))
    page = language_model.losses(table)
    assert "mhc (small) minus plain, seed by seed: -0.1000, -0.2000, -0.3000. Lower with every one of 3 seeds." in page
    assert "+0.1000, +0.2000, +0.3000. Higher with every one of 3 seeds." in page
    assert "+0.1000, -0.2000, +0.0000. The seeds do not agree in sign: this shows no difference." in page
    assert "| plain | 4.0000 | 3.0000 to 5.0000 | 4.0000 | 9 | 7 | 1,024 |" in page
    assert "images/language-model-card.svg" in page


def table(titles, rows) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in [titles, *rows])


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--steps", "0"), "--steps 0: at least 1 is needed"),
        (("--dim", "20", "--heads", "4"), "--dim 20: --heads 4 needs a multiple of 8"),
        (("--text", "nosuch"), "--text nosuch: there is no such file or folder"),
        (("--lr", "nan"), "--lr nan: a positive number is needed"),
        (("--plot", "curves.png"), "the picture is SVG"),
        (("--json", "nosuch/lm.json"), "nosuch/lm.json: not a file in a folder that exists"),
        (("--device", "meta"), "the choices are cpu and cuda"),
        (("--residual", "none"), "invalid choice: 'none' (choose from"),
        (("--seq", "100000000"), "but --seq 100000000 needs at least"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_with_one_sentence(args, sentence, main, capsys):
    with pytest.raises(SystemExit) as end:
        main([*args, "--device", "cpu"] if "--device" not in args else args)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == ""
    assert err.startswith("mhc_lm: ") and sentence in err and err.count("\n") == 1


@pytest.fixture
def example(monkeypatch):
    """The example as a module of this process: what it sets for the whole process is put back."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("mhc_lm", ROOT / "examples" / "mhc_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handler, deterministic = signal.getsignal(signal.SIGINT), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield module
    signal.signal(signal.SIGINT, handler)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def main(example):
    return example.main
