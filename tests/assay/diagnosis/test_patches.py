"""Patches: one fault in a small kernel is found in its source and mended; hostile and lucky edits are not taken."""

import importlib.util
import itertools
import os
import sys
import textwrap

import pytest

from goldsmith import assay
from goldsmith.assay import probes
from goldsmith.assay.checks import examine
from goldsmith.assay.diagnosis.source.candidate_source import NoSource, candidate_source
from goldsmith.assay.diagnosis.source.edits import Edit
from goldsmith.assay.diagnosis.source.mutants import Mutants, problem
from goldsmith.assay.diagnosis.source.search import find_patch

NUMBER = itertools.count()
SECONDS = 60.0

TORCH = '''
import torch

from goldsmith import assay


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        T, D = x.shape
        rows = []
        for t in range(0, T):
            mean = x[t].square().sum() / D
            rows.append((mean + eps).rsqrt())
        rstd = torch.stack(rows)[:, None]
        ctx.save_for_backward(x, w, rstd)
        return x * rstd * w

    @staticmethod
    def backward(ctx, grad):
        x, w, rstd = ctx.saved_tensors
        D = x.shape[1]
        normed = x * rstd
        inner = (grad * w * normed).sum(-1, keepdim=True) / D
        dx = (grad * w - normed * inner) * rstd
        dw = torch.zeros_like(w)
        for t in range(len(x)):
            dw += grad[t] * normed[t]
        return dx, dw, None


def golden(x, w, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@assay.case(T=[3, 1], D=[5, 4])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 0.25}


target = assay.Target(Scan.apply, golden, cases=tokens, name="scan")
'''

TRITON = '''
import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, stride, D, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    mask = d < D
    x = tl.load(x_ptr + row * stride + d, mask=mask, other=-float("inf")).to(tl.float32) * scale
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * D + d, e / tl.sum(e, axis=0), mask=mask)


def softmax(x, scale):
    x = x.contiguous()
    y = torch.empty_like(x)
    _softmax_kernel[(x.shape[0],)](x, y, x.stride(0), x.shape[1], scale, BLOCK=8)
    return y


def golden(x, scale):
    return torch.softmax(x * scale, -1)


@assay.case(T=[3], D=[8, 5])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "scale": 0.5}


target = assay.Target(softmax, golden, cases=tokens, name="softmax", backward=None)
'''
FAULTS = {
    "operator": (TORCH, ".square().sum() / D", ".square().sum() * D"),
    "constant": (TORCH, "range(0, T)", "range(1, T)"),
    "name": (TORCH, "(grad * w * normed)", "(grad * w * x)"),
    "factor missing": (TORCH, "normed * inner) * rstd", "normed * inner)"),
    "addend missing": (TORCH, "(mean + eps).rsqrt()", "mean.rsqrt()"),
    "operand order": (TORCH, "(grad * w - normed * inner)", "(normed * inner - grad * w)"),
    "axis": (TORCH, "(grad * w * normed).sum(-1, keepdim=True)", "(grad * w * normed).sum(0, keepdim=True)"),
    "assignment": (TORCH, "dw += grad[t]", "dw = grad[t]"),
    "saved tensor": (TORCH, "ctx.save_for_backward(x, w, rstd)", "ctx.save_for_backward(x, x, rstd)"),
    "comparator": (TRITON, "mask = d < D", "mask = d > D"),
    "bound": (TRITON, "mask = d < D", "mask = d < D - 1"),
    "offset": (TRITON, "y_ptr + row * D + d", "y_ptr + row * stride + row + d"),
    "function": (TRITON, "e / tl.sum(e, axis=0)", "e / tl.max(e, axis=0)"),
    "other": (TRITON, 'other=-float("inf")', "other=0.0"),
}


def load(tmp_path, text):
    """The module of a text in a file, as an import of the user's would make it."""
    name = f"patched_kernel_{os.getpid()}_{next(NUMBER)}"
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _modules():
    yield
    for name in [n for n in sys.modules if n.startswith("patched_kernel_")]:
        del sys.modules[name]


def failing(target):
    _, examinations = examine(
        target, list(target.cases), None, "cpu", 0, frozenset(probes.QUICK), None, until_failing=True
    )
    return examinations


@pytest.mark.parametrize("kind", FAULTS)
def test_an_edit_of_each_kind_is_undone(tmp_path, kind):
    text, right, wrong = FAULTS[kind]
    assert text.count(right) == 1
    module = load(tmp_path, text.replace(right, wrong))
    search = find_patch(module.target, failing(module.target), SECONDS)
    assert search.patch is not None, search.reason
    patched = load(tmp_path, search.patch.text)
    assert assay.check(patched.target, seed=7, raises=False).ok
    assert f"\n-{' ' * 4}" in search.patch.diff and search.patch.cases == len(module.target.cases)
    assert wrong in (tmp_path / f"{module.__name__}.py").read_text()  # the user's file stays
