"""The first check of a process imports only what it needs."""

import subprocess
import sys

import pytest
import torch

from goldsmith.assay.support.output_gradients import gradients_of

CHECK = """
import sys
import torch
from goldsmith import assay

def square(x, w):
    return x * x * w

@assay.case(T=[3, 13])
def tokens(make, T):
    return {"x": make.normal(T, 12), "w": make.normal(12)}

assay.check(assay.Target(square, square, cases=tokens))
print(*sorted(sys.modules))
"""
COSTLY = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
)


def test_a_check_of_plain_torch_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(set(COSTLY) & set(done.stdout.split())) == []


def test_output_gradients_arrive_with_their_own_strides():
    arrived = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            arrived.append(g.stride())
            return g

    x = torch.randn(3, 4, requires_grad=True)
    sent = torch.randn(1).expand(3, 4)
    (gradient,) = gradients_of([Identity.apply(x)], [x], [sent])
    assert arrived == [(0, 0)]
    assert torch.equal(gradient, sent)


def test_gradients_of_several_results_are_those_of_autograd():
    x, w, unused = (torch.randn(3, requires_grad=True) for _ in range(3))
    results, sent = [x * w, w.sin()], [torch.randn(3), torch.randn(3)]
    expected = torch.autograd.grad(results, [x, w, unused], sent, retain_graph=True, allow_unused=True)
    for ours, theirs in zip(gradients_of(results, [x, w, unused], sent), expected, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_an_output_gradient_of_another_shape_is_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"result 0 has shape \[3\] and its output gradient \[1\]"):
        gradients_of([x * 2], [x], [torch.ones(1)])
