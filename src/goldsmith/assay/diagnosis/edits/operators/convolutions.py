"""Convolutions, forward and backward: taps left out, reversed or overwriting each other; sums cut short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..golden_edit import CALL, NamedEdit, Primitive, do, named
from ..primitives import windows as w
from ..primitives.positions import exchange
from ..primitives.tensors import constant, restrict, scale
from ..reductions import cut

STEPS = ((1, "after it"), (-1, "before it"))


def edits(node: Node, nodes: Sequence[Node]) -> Iterator[NamedEdit]:
    if node.name == "convolution" and floating(node.args[0]):
        yield from _forward(node)
    elif node.name == "convolution_backward" and floating(node.args[0]):
        yield from _backward(node)


def _forward(node: Node) -> Iterator[NamedEdit]:
    kernel, name = node.args[1], node.operand(1) or "the kernel"
    for cause, text, other in _kernels(kernel):
        yield named(node, cause, 0.7, f"{name} is taken {text}", (1, other), operand=name)
    for cause, prior, text, span, params in cut("the sum over channels", name, 1, kernel.shape[1]):
        yield named(node, cause, prior, text, (1, do(restrict, axis=1, span=span)), **params)
    if node.args[2] is not None:
        term = node.operand(2) or "the bias"
        text = f"{term} is left out of {node.expression}"
        yield named(node, "missing_term", 0.7, text, (2, do(constant, new=None)), term=term)
        yield named(node, "repeated_term", 0.6, f"{term} is added twice", (2, do(scale, c=2)), term=term)


def _kernels(kernel: Tensor) -> Iterator[tuple[str, str, Primitive]]:
    """(cause, text, the changed kernel)"""
    axes = tuple(range(2, kernel.dim()))
    border = "off_by_one" if kernel.shape[2] > 1 else "truncated_reduction"
    for end, word in ((-1, "last"), (0, "first")):
        yield border, f"without its {word} tap", do(w.drop_taps, places=tuple((a, end) for a in axes))
        for a in axes if len(axes) > 1 else ():
            yield border, f"without the {word} taps of axis {a}", do(w.drop_taps, places=((a, end),))
    yield "permuted", "in reverse order: convolved, not correlated", do(w.flip, axes=axes)
    if len(axes) == 2 and kernel.shape[-1] == kernel.shape[-2] > 1:
        yield "transposed", "with its two axes transposed", do(exchange, i=2, j=3)
    if kernel.shape[0] == kernel.shape[1] > 1:
        yield "transposed", "with its channels transposed", do(exchange, i=0, j=1)


def _backward(node: Node) -> Iterator[NamedEdit]:
    of_input, of_kernel, of_bias = node.args[10]
    for cause, text, other in _kernels(node.args[2]) if of_input else ():
        text = f"the gradient of the input takes the kernel {text}"
        yield named(node, cause, 0.7, text, (CALL, do(w.with_kernel, of=other)))
    for which in ("last", "first") if of_input else ():
        text = f"the gradient of the input is stored where it should be added: the {which} tap is left"
        stored = CALL, do(w.store_kernel_taps, last=which == "last")
        yield named(node, "overwritten_accumulator", 0.7, text, stored, left=which)
    n = node.args[0].shape[0]
    for result, of in [(1, "kernel")] * of_kernel + [(2, "bias")] * of_bias if n > 1 else ():
        for cause, how, lo, hi in (
            ("truncated_reduction", f"uses only the first of {n} samples", 0, 1),
            ("overwritten_accumulator", f"uses only the last of {n} samples", n - 1, n),
            ("off_by_one", f"leaves out the last of {n} samples", 0, n - 1),
        ):
            some = CALL, do(w.of_samples, which=result, lo=lo, hi=hi)
            yield named(node, cause, 0.6, f"the gradient of the {of} {how}", some, axis=0)
