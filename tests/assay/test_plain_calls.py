"""Plain calls find what is right only where backwards follow their forwards, and what else callers do with tensors."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from goldsmith import assay

KEPT = []


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, way):
        p = torch.softmax(x, -1)
        ctx.p, ctx.way = p, way
        if way in ("stack", "queue") and ctx.needs_input_grad[0]:
            KEPT.append(p)
            del KEPT[:-9]
        return p if way == "result" else p.clone()

    @staticmethod
    def backward(ctx, g):
        p = ctx.p
        if ctx.way in ("stack", "queue"):
            ctx.p = p = KEPT.pop(-1 if ctx.way == "stack" else 0)
            ctx.way = ""
        g = g.clamp(-1000, 1000) if ctx.way == "large" else g
        gx = p * (g - (g * p).sum(-1, keepdim=True))
        return gx * (ctx.way != "small" or float(g.abs().max()) > 1e-3), None


@assay.case(T=[3], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D)}


def softmax(x):
    return torch.softmax(x, -1)


def checked(candidate, golden, cases, **more):
    return assay.check(assay.Target(candidate, golden, cases=cases, **more), probes="calls", raises=False)


@pytest.mark.parametrize("way", ["stack", "queue", "large", "small", "result", ""])
def test_gradients_are_right_in_every_order_and_for_output_gradients_of_every_size(way):
    KEPT.clear()
    report = checked(lambda x: _Softmax.apply(x, way), softmax, rows)
    assert report.ok == (not way), report
    words = {"large": "times 2^16", "small": "times 2^-16", "result": "changed in place before the backward"}
    word = words.get(way, "in the order")
    assert all(f.probe == "calls" for f in report.findings) and (not way or word in str(report)), report


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        buffer = KEPT.pop(0)
        KEPT.append(buffer)
        return torch.mul(g, 2, out=buffer)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("buffers", [2, 4, 7, 40])
def test_gradients_that_a_caller_keeps_are_not_overwritten(buffers, own):
    KEPT[:] = [torch.zeros(3, 6) for _ in range(buffers)]
    backward = {"backward": lambda x, y, grad_y: _Ring.backward(None, grad_y)} if own else {}
    report = checked((lambda x: x * 2) if own else _Ring.apply, lambda x: x * 2, rows, outputs=("y",), **backward)
    assert report.ok == (buffers == 40), report  # more than a case needs
    kinds = {(f.kind, f.tensor) for f in report.findings}
    assert kinds <= {("overwritten_result", "x.grad")}, report


@assay.case(T=[4])
def squares(make, T):
    return {"a": make.normal(T, T), "b": make.normal(T, T)}


@pytest.mark.parametrize("wrong", [True, False])
def test_one_tensor_may_be_two_inputs(wrong):
    def product(a, b):
        return a.T @ a if wrong and a.data_ptr() == b.data_ptr() else a @ b

    report = checked(product, lambda a, b: a @ b, squares, backward=None)
    assert [f.text.partition(":")[0] for f in report.findings] == wrong * [
        "one tensor as a and as b gives another result than two equal ones"
    ]


def test_a_function_that_refuses_gradients_of_given_inputs_is_called_by_backward():
    def candidate(x):
        return checkpoint(lambda t: torch.softmax(t, -1), x.square(), use_reentrant=True) * 2

    report = checked(candidate, lambda x: torch.softmax(x.square(), -1) * 2, rows)
    assert report.ok, report


BUFFERS, BUSY = [], []


def _pooled(x):
    """softmax in a buffer of a pool, which takes it back when the tensor that it returned has died."""
    for row in [row for row in BUSY if row[0]() is None]:
        BUSY.remove(row)
        BUFFERS.append(row[1])
    buffer = BUFFERS.pop() if BUFFERS else torch.empty(x.shape)
    result = torch.softmax(x, -1, out=buffer).detach()
    BUSY.append((weakref.ref(result), buffer))
    return result


def test_a_result_lives_as_long_as_a_view_of_it():
    report = checked(_pooled, softmax, rows, backward=None)
    assert "changed after the call had returned" in str(report), report


def test_inputs_with_gaps_are_compared_like_others():
    @assay.case(T=[5])
    def every_other(make, T):
        return {"x": make.normal(2 * T)[::2]}

    def changing(x):
        x += 1
        return x * 2

    assert checked(lambda x: x * 2, lambda x: x * 2, every_other, backward=None).ok
    assert not checked(changing, lambda x: (x + 1) * 2, every_other, backward=None).ok
