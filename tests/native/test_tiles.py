"""The kernels for AMX tiles, with tiles emulated in plain C++, on any machine with avx512_bf16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from goldsmith.core import native
from native.variants import library
from repo.tree import SOURCE

LEVELS = native.LEVELS
pytestmark = pytest.mark.skipif(
    native.reason() is not None or LEVELS.index(native.machine_isa()[0]) < LEVELS.index("avx512_bf16"),
    reason="the level amx is compiled with instructions of avx512_bf16, which this machine lacks",
)
JUDGED = """
import json, runpy, sys, torch
from goldsmith import Op, assay, experts
from goldsmith.cli.targets import op_target
from goldsmith.core import native
from goldsmith.experts import _native_abi
_native_abi.busy = lambda weights, flop: 64
native.threads = _native_abi.threads = lambda: 3
verdicts = {"level": native.isa()}

def results(workers, E, format, k):
    "Forward and backward of a layer with more or fewer parts than workers."
    native.threads = _native_abi.threads = lambda: workers
    torch.manual_seed(0)
    base = experts.pack(torch.randn(E, 192, 128), torch.randn(E, 128, 96), format=format)
    lora = experts.LoRA(E, 128, 96, rank=5)
    for factor in lora.parameters():
        torch.nn.init.normal_(factor, std=0.1)
    x, weights = torch.randn(90, 128).bfloat16().requires_grad_(), torch.rand(90, k).requires_grad_()
    y = experts.moe(x, torch.rand(90, E).topk(k).indices, weights, base, lora=lora)
    return [y, *torch.autograd.grad(y, (x, weights, *lora.parameters()), torch.randn(90, 128).bfloat16())]

for layer in ((9, "bf16", 2), (2, "bf16", 1), (9, "int4", 2), (4, "int8", 3), (9, "mxfp4", 2)):
    alone = results(1, *layer)
    for workers in (2, 3, 7):
        same = all(map(torch.equal, alone, results(workers, *layer)))
        verdicts[f"{layer} with {workers} workers"] = "pass" if same else "bits differ from one worker"
native.threads = _native_abi.threads = lambda: 3
for name in ("experts.moe", "experts.moe_int8"):
    target = op_target(Op.get(name), "native", dtype=torch.bfloat16)
    for case in Op.get(name).cases:
        if "large" not in case.tags:
            report = assay.check(target, case.name, dtype=torch.bfloat16, raises=False, probes=["values", "guard"])
            verdicts[f"{name} {case.name}"] = "pass" if report.verdict == "pass" else str(report)
runpy.run_path(sys.argv[1], run_name="__main__")  # steps, whose rows must not depend on each other
print(json.dumps(verdicts))
"""
STEPS = Path(__file__).with_name("cases") / "step.py"


@pytest.mark.sweep(3, part=2)
def test_every_case_passes_with_emulated_tiles():
    environment = os.environ | {
        "GOLDSMITH_LIBRARY": str(library("tiles")),
        "PYTHONPATH": str(SOURCE.parent),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("GOLDSMITH_ISA", None)
    done = subprocess.run([sys.executable, "-c", JUDGED, str(STEPS)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert verdicts.pop("level") == "amx"
    wrong = [f"{name}: {text}" for name, text in verdicts.items() if text != "pass"]
    assert len(verdicts) > 50 and not wrong, "\n".join(wrong)
