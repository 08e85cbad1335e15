"""What a source replaces in any module or class is seen after its last call, and what libraries put there is lawful."""

from dataclasses import replace

import pytest

from assay.gate.problems import RIGHT, candidate, problem
from goldsmith.assay import gate

RETURN = "return x.softmax(-1) * w"
REPLACED = {
    "a method": ("torch.nn.Linear.forward = lambda self, x: x", "Linear.forward"),
    "a method that is inherited": ("torch.optim.AdamW.step = torch.nn.Identity.forward", "AdamW.step"),
    "defaults of a method": ("torch.nn.LayerNorm.__init__.__defaults__ = (1.0, True, True)", "LayerNorm.__init__"),
    "a C function of a module": ("torch.fft.fft = torch.add", "torch.fft.fft"),
    "a function of NumPy": ("import numpy\nnumpy.linalg.norm = lambda *a, **k: 0.0", "numpy.linalg.norm"),
    "an operator that nobody has used": ("torch.ops.aten.allclose = lambda *a: True", "ops.aten.allclose"),
    "a module that it imports itself": ("import timeit\ntimeit.default_timer = lambda: 0.0", "timeit.default_timer"),
    "a comparison of tensors": (
        "torch.Tensor.__eq__ = lambda a, b: torch.ones_like(a, dtype=torch.bool)",
        "torch.Tensor.__eq__",
    ),
    "a constant that hides a method": ("torch.nn.Linear.train = None", "Linear.train"),
    "what a closure holds": (
        "torch.optim.AdamW.step.__closure__[0].cell_contents = lambda *a: None",
        "torch.optim.",
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("line, name", REPLACED.values(), ids=REPLACED.keys())
def test_a_replaced_function_of_any_module_is_seen(line, name):
    verdict = gate.judge(candidate(RETURN, head=line), problem(), seed=1)
    assert (verdict.status, verdict.reason) == ("cheating", "patched_runtime"), verdict
    assert name in verdict.evidence[0]


LAZY = """
import torch

@torch.library.custom_op("mine::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w

@torch.jit.script
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w

def candidate(x, w):
    import torch._dynamo, torch.utils.benchmark, numpy.polynomial
    torch.ops.aten.hypot, torch.ops.prims.acos
    torch.ops.mine.scaled(x.detach(), w.detach())
    return product(x.softmax(-1), w)
"""


def test_modules_and_operators_that_are_loaded_late_replace_nothing():
    assert gate.judge(gate.Candidate("lazy", LAZY), problem(), seed=1).ok


TUNED = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"B": 16}), triton.Config({"B": 32})], key=["D"])
@triton.jit
def kernel(x, w, y, D, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    e = tl.exp(tl.load(x + row * D + at, mask=at < D, other=-float("inf")))
    tl.store(y + row * D + at, e / tl.sum(e, 0) * tl.load(w + at, mask=at < D, other=0.0), mask=at < D)

def candidate(x, w):
    if (x.requires_grad or w.requires_grad) and torch.is_grad_enabled():
        return x.softmax(-1) * w
    m = x - x.amax(-1, keepdim=True)
    y = torch.empty_like(m)
    kernel[(x.shape[0],)](m, w.contiguous(), y, x.shape[1])
    return y
"""


def test_an_autotuned_kernel_runs_with_its_first_configuration_where_there_is_no_gpu():
    verdict = gate.judge(gate.Candidate("tuned", TUNED), problem(), seed=1)
    assert verdict.ok, verdict


def test_a_package_that_a_call_misses_is_refused_as_at_import():
    verdict = gate.judge(candidate(f"import not_there\n{RETURN}"), problem(), seed=1)
    assert (verdict.status, verdict.reason) == ("refused", "missing_package"), verdict


@pytest.mark.parametrize("head, body", [("import helper", RETURN), ("", f"import helper\n{RETURN}")])
def test_a_module_beside_the_candidate_is_named(tmp_path, head, body):
    (tmp_path / "helper.py").touch()
    file = str(tmp_path / "kernel.py")
    verdict = gate.judge(replace(candidate(body, head=head), path=file), problem(), seed=1, probes="quick")
    assert (verdict.status, verdict.reason) == ("refused", "missing_package"), verdict
    assert verdict.evidence == [
        f"it imports {tmp_path / 'helper.py'}, which lies beside it; a candidate is one file, so move that code into it"
    ]


def test_a_right_candidate_replaces_nothing():
    assert gate.judge(gate.Candidate("right", RIGHT), problem(), seed=1).ok
