"""Kernels of AMX's tiles, with the tiles computed in plain C++: any machine with avx512_bf16 tries them."""

import json
import os
import subprocess
import sys

import pytest

from goldsmith.core import native
from native.variants import library
from repo.tree import SOURCE

LEVELS = native.LEVELS
pytestmark = pytest.mark.skipif(
    native.reason() is not None or LEVELS.index(native.machine_isa()[0]) < LEVELS.index("avx512_bf16"),
    reason="the level amx is compiled with instructions of avx512_bf16, which this machine has not",
)
JUDGED = """
import json, sys, torch
from goldsmith import Op, assay
from goldsmith.cli.targets import op_target
from goldsmith.core import native
found = {"level": native.isa()}
for name in ("experts.moe", "experts.moe_int8"):
    target = op_target(Op.get(name), "native", dtype=torch.bfloat16)
    for case in Op.get(name).cases:
        if "large" not in case.tags:
            report = assay.check(target, case.name, dtype=torch.bfloat16, raises=False, probes=["values", "guard"])
            found[f"{name} {case.name}"] = "pass" if report.verdict == "pass" else str(report)
print(json.dumps(found))
"""


def test_every_case_holds_on_tiles():
    environment = os.environ | {
        "GOLDSMITH_LIBRARY": str(library("tiles")),
        "PYTHONPATH": str(SOURCE.parent),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("GOLDSMITH_ISA", None)
    done = subprocess.run([sys.executable, "-c", JUDGED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("level") == "amx"
    wrong = [f"{name}: {text}" for name, text in found.items() if text != "pass"]
    assert len(found) > 50 and not wrong, "\n".join(wrong)
