"""docs/how-it-is-built.md: every file and function of a path is there, and the paths are really taken."""

import os
import re
import subprocess
import sys

import pytest

from repo.tree import ROOT

sys.path.append(str(ROOT / "scripts"))
import paths as drawing

PATHS = {path.picture: path for path in drawing.paths(drawing.PAGE.read_text())}
MOST = {"path-pre.svg": 8, "path-check.svg": 12, "path-diagnose.svg": 20, "path-moe.svg": 25, "path-finetune.svg": 12}

# Other packages are imported before, because every call costs while calls are recorded.
TRACE = """
import sys, threading, torch
codes = set()

def record(frame, event, argument):
    if event == "call":
        codes.add(frame.f_code)

threading.setprofile(record)
sys.setprofile(record)
"""
END = """
sys.setprofile(None)
parts = ((code.co_filename.partition("/src/goldsmith/")[2], code.co_name) for code in codes)
print(*sorted({file + "|" + name for file, name in parts if file}), sep="\\n")
"""
PRE = """
import torch
from goldsmith import mhc
n, D = 4, 8
x = torch.randn(5, n, D, requires_grad=True)  # up to four tokens have kernels of their own
h, _, _ = mhc.pre(x, torch.randn(2 * n + n * n, n * D), torch.randn(3), torch.randn(2 * n + n * n), backend="triton")
h.sum().backward()
"""
ASSAY = """
import torch
from goldsmith import assay

def golden(x):
    return (x * x).mean(-1)

def candidate(x):
    return (x * x).mean(-1) * {factor}

@assay.case(T=[3], D=[8])
def rows(make, T, D):
    return {{"x": make.normal(T, D)}}

target = assay.Target(candidate, golden, cases=rows)
"""
CHECK = ASSAY.format(factor=1.0) + "report = assay.check(target)\nassert report.ok\n"
DIAGNOSE = ASSAY.format(factor=1.5) + "print(len(str(assay.diagnose(target))), file=sys.stderr)\n"
MOE = """
import torch
from goldsmith import experts
E, H, I, T, k = 4, 64, 32, 3, 2
base = experts.pack(torch.randn(E, 2 * I, H), torch.randn(E, H, I), format="bf16")
weights = torch.rand(T, k)
experts.moe(torch.randn(T, H), torch.randint(0, E, (T, k)), weights, base, backend="native")
"""
FINETUNE = """
from goldsmith.cli import app
options = "--data examples/macbeth/act-5.txt --steps 1 --batch-size 1 --seq-len 16 --threads 1 --output"
sys.argv = ["goldsmith", "finetune", "examples/shakespeare-moe", *options.split(), {output!r}]
real, sys.stdout = sys.stdout, sys.stderr
try:
    app()
except SystemExit as end:
    assert not end.code, end.code
sys.stdout = real
"""


@pytest.mark.parametrize("picture", MOST)
def test_a_path_names_few_files_and_each_has_its_function(picture):
    steps = PATHS[picture].steps
    assert 0 < len(steps) <= MOST[picture]
    for step in steps:
        file = (ROOT / "docs" / step.link).resolve()
        assert str(file).endswith(step.file)
        kind = r"(?:def|class)\s+" if file.suffix == ".py" else ""
        assert re.search(rf"\b{kind}{re.escape(step.function)}\b", file.read_text()), f"{step.file}: {step.function}"


@pytest.mark.parametrize(
    "picture, program",
    [
        pytest.param("path-pre.svg", PRE, marks=pytest.mark.sweep(5, part=0)),
        pytest.param("path-check.svg", CHECK, marks=pytest.mark.sweep(5, part=1)),
        pytest.param("path-diagnose.svg", DIAGNOSE, marks=pytest.mark.sweep(5, part=2)),
        pytest.param("path-moe.svg", MOE, marks=pytest.mark.sweep(5, part=3)),
        pytest.param("path-finetune.svg", FINETUNE, marks=pytest.mark.sweep(5, part=4)),
    ],
)
def test_a_path_is_really_taken(picture, program, tmp_path):
    program = program.replace("{output!r}", repr(str(tmp_path / "run")))
    command = [sys.executable, "-c", TRACE + program + END]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    executed = set(done.stdout.split())
    for step in PATHS[picture].steps:
        if step.file.endswith(".py") and not step.function[0].isupper():
            assert f"{step.file}|{step.function}" in executed, f"{step.file}: {step.function} is not called"


@pytest.mark.parametrize("script", ["paths", "diagnosis_picture"])
def test_the_pictures_are_drawn_from_the_page(script):
    command = [sys.executable, f"scripts/{script}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}: run `python scripts/{script}.py`"
