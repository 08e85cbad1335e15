"""Registers an Op with `torch.library`: one operator for the forward, one for the backward, joined by autograd.

The backward is an operator of its own, so that a compiled graph calls it as a whole and tracing never enters a kernel.
It has no derivative: asking for one raises, instead of returning a silent zero.

Where only autograd is active, a call with gradients bypasses both: `eager` is a plain `torch.autograd.Function`. The
dispatcher costs 150 us in each direction, more than a small layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .signatures import PLAIN, repeated

_UNCHANGED = nullcontext()
Given = TypeVar("Given", Tensor, Tensor | None)


class Declaration(Protocol):
    """The part of an operator's declaration that autograd needs; `Op` (op.py) provides it."""

    name: str
    qualname: str
    package: str
    schema: str
    summary: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    options: tuple[str, ...]
    results: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    residuals: tuple[str, ...]
    grads: tuple[str, ...]
    _custom_backward: Any

    @property
    def reference(self) -> ModuleType: ...

    def backend(self, name: str) -> ModuleType: ...

    def check(self, *tensors: Tensor | None, **options: object) -> None: ...

    def fake(self, *tensors: Tensor | None, **options: object) -> tuple[Tensor, ...]: ...

    def choose(self, backend: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> str: ...

    def run(self, backend: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Tensor, ...]: ...


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) or a forward-mode derivative is active.

    They only see through plain torch: a kernel's result would silently have no tangent.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def register(op: Declaration) -> Any:
    """Register the operator, with its fake and its autograd, and its backward operator."""
    inside, _, outside = op.schema.partition("->")
    forward = torch.library.custom_op(
        op.qualname, _forward(op), mutates_args=(), schema=f"{inside.strip()[:-1]}, str backend) ->{outside}"
    )
    forward.register_fake(_fake(op))
    if op.grads:
        backward = torch.library.custom_op(
            f"{op.qualname}__vjp", _backward(op), mutates_args=(), schema=_backward_schema(op)
        )
        backward.register_fake(_backward_fake(op))
        backward.register_autograd(_no_second_derivative(op), setup_context=_keep_nothing)
        op._custom_backward = backward
        forward.register_autograd(_autograd(op, backward), setup_context=_setup_context(op))
    else:  # an operator that is itself a derivative
        forward.register_autograd(_no_second_derivative(op), setup_context=_keep_nothing)
    return forward


def plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all are torch's own tensors. Subclasses, such as fake tensors, need the dispatcher."""
    return PLAIN.issuperset(map(type, tensors))


def watched() -> bool:
    """Whether a profiler or a dispatch mode (counting FLOPs, checkpointing) needs to see the call."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd._profiler_enabled()


def as_stored(tensors: Sequence[Given]) -> tuple[Given, ...]:
    """The tensors, with copies of those whose memory does not hold their values.

    torch negates some tensors lazily (`z.conj().imag`), and zero gradients may have no memory at all. A kernel cannot
    see either.
    """
    if not any([t is not None and (t.is_neg() or t._is_zerotensor()) for t in tensors]):
        return tuple(tensors)
    return tuple(t if t is None else t.new_zeros(t.shape) if t._is_zerotensor() else t.resolve_neg() for t in tensors)


def undisturbed(tensors: tuple[Tensor | None, ...]) -> AbstractContextManager[Any]:
    """A context in which kernels launch on the inputs' GPU, whichever is current, and autocast is off."""
    device = next(t for t in tensors if t is not None).device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    if not elsewhere and not autocast:
        return _UNCHANGED
    stack = ExitStack()
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def eager(op: Declaration) -> Any:
    """The operator as an autograd function, to be applied to (backend, options, *tensors)."""
    visible = [op.results.index(name) for name in op.outputs]
    first = 2  # index of the first tensor among the arguments
    positions = [first + op.inputs.index(name) for name in op.grads]
    keep = [(*op.inputs, *op.results).index(name) for name in op.residuals]
    saved = [op.results.index(name) for name in op.saved]

    def forward(ctx: Any, backend: str, options: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        results = op.run(backend, tensors, options)
        everything = (*tensors, *results)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[i] for i in saved))
        ctx.save_for_backward(*(everything[i] for i in keep))
        ctx.goldsmith = (backend, options)
        return results

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        backend, options = ctx.goldsmith
        needs = [ctx.needs_input_grad[p] for p in positions]
        cotangents, tensors = [grads[i] for i in visible], ctx.saved_tensors
        out: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if any(needs) and any(g is not None for g in cotangents):
            traced = torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed() or watched()
            if traced or not plain((*cotangents, *tensors)):
                values = (options[name] for name in op.options)
                results = op._custom_backward(*cotangents, *tensors, *values, needs, backend)
                results = results if isinstance(results, (tuple, list)) else (results,)
                gradients = dict(zip(op.grads, results, strict=True))
            else:
                gradients = _gradients(op, backend, cotangents, tensors, options, needs)
            for name, position, need in zip(op.grads, positions, needs, strict=True):
                out[position] = gradients[name] if need else None
        return tuple(out)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__doc__": op.summary}
    return type(op.name.replace(".", "_"), (torch.autograd.Function,), members)


def fresh(results: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Results as the caller expects them: contiguous, sharing no memory with an input or another result."""
    if _own(results, tensors):
        return tuple(results)
    sparse = [r.layout is not torch.strided for r in results]
    if any(sparse):  # a sparse gradient, which has no memory of its own to share
        return tuple(r if s else fresh((r,), tensors)[0] for r, s in zip(results, sparse, strict=True))
    seen = {_memory(t) for t in tensors if t is not None}
    out = []
    for result in results:
        # a reshaped result is a view, which autograd does not allow to be marked as written
        result = result.contiguous().detach()
        if _memory(result) in seen:
            result = result.clone()
        seen.add(_memory(result))
        out.append(result)
    return tuple(out)


def _memory(tensor: Tensor) -> tuple[str, int]:
    """Where a tensor's numbers are; of one without numbers its storage, which torch compares, too."""
    storage = tensor.untyped_storage()
    return ("address", storage.data_ptr()) if tensor.numel() else ("storage", storage._cdata)


def _own(results: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> bool:
    """The usual case, decided without looking at storages (20 us): whole tensors with distinct addresses."""
    begins = []
    for result in results:
        if result.layout is not torch.strided or result._is_view() or not result.is_contiguous():
            return False
        if result.storage_offset():  # a part of a tensor, which the dispatcher's kernels do not see as a view
            return False
        begins.append(result.data_ptr())
    distinct = set(begins)
    if 0 in distinct or len(distinct) < len(begins):  # a result without numbers, or two that share theirs
        return False
    return distinct.isdisjoint([t.data_ptr() for t in tensors if t is not None])


def _split(op: Declaration, args: Sequence[Any]) -> tuple[tuple[Tensor | None, ...], dict[str, Any], str]:
    n = len(op.inputs)
    return tuple(args[:n]), dict(zip(op.options, args[n:-1], strict=True)), args[-1]


def _unwrap(results: tuple[Tensor, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _forward(op: Declaration) -> Any:
    def forward(*args: object) -> Any:
        tensors, options, backend = _split(op, args)
        return _unwrap(op.run(op.choose(backend, tensors, options), tensors, options))

    return forward


def _fake(op: Declaration) -> Any:
    def fake(*args: object) -> Any:
        tensors, options, _ = _split(op, args)
        op.check(*tensors, **options)
        return _unwrap(op.fake(*tensors, **options))

    return fake


def _setup_context(op: Declaration) -> Any:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, options, backend = _split(op, inputs)
        results = output if isinstance(output, (tuple, list)) else (output,)
        named = dict(zip(op.inputs, tensors, strict=True)) | dict(zip(op.results, results, strict=True))
        # absent gradients stay None: a zero of x's size would be read and multiplied for nothing
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(named[name] for name in op.saved))
        ctx.save_for_backward(*(named[name] for name in op.residuals))
        ctx.goldsmith = (options, backend, [op.inputs.index(g) for g in op.grads])

    return setup_context


def _autograd(op: Declaration, backward_op: Any) -> Any:
    visible = [op.results.index(name) for name in op.outputs]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        options, backend, positions = ctx.goldsmith
        needs = [bool(ctx.needs_input_grad[p]) for p in positions]
        out: list[Any] = [None] * (len(op.inputs) + len(op.options) + 1)
        cotangents = [grads[i] for i in visible]
        if any(needs) and any(g is not None for g in cotangents):
            results = backward_op(*cotangents, *ctx.saved_tensors, *options.values(), needs, backend)
            results = results if isinstance(results, (tuple, list)) else (results,)
            for position, need, result in zip(positions, needs, results, strict=True):
                out[position] = result if need else None
        return tuple(out)

    return backward


def _backward_schema(op: Declaration) -> str:
    parsed = torch._C.parse_schema(op.qualname + op.schema)
    options = [f"{_written(str(a.type))} {a.name}" for a in parsed.arguments if a.name in op.options]
    arguments = [
        *(f"Tensor? grad_{name}" for name in op.outputs),
        *(f"Tensor{'?' if name in op.optional else ''} {name}" for name in op.residuals),
        *options,
        "bool[] needs",
        "str backend",
    ]
    return f"({', '.join(arguments)}) -> ({', '.join(f'Tensor d_{g}' for g in op.grads)})"


def _written(kind: str) -> str:
    """A type as a schema writes it: "float?" for Optional[float]."""
    inside = kind.removeprefix("Optional[")
    return kind if inside == kind else f"{inside.removesuffix(']')}?"


def _backward_split(op: Declaration, args: Sequence[Any]) -> tuple[dict, dict, dict, list[bool], str]:
    a, b = len(op.outputs), len(op.outputs) + len(op.residuals)
    grads = dict(zip(op.outputs, args[:a], strict=True))
    tensors = dict(zip(op.residuals, args[a:b], strict=True))
    options = dict(zip(op.options, args[b:-2], strict=True))
    return grads, tensors, options, args[-2], args[-1]


def _backward(op: Declaration) -> Any:
    def backward(*args: object) -> Any:
        grads, tensors, options, needs, backend = _backward_split(op, args)
        backend = op.choose(backend, tuple(tensors.get(name) for name in op.inputs), options)
        gradients = _gradients(op, backend, list(grads.values()), tuple(tensors.values()), options, needs)
        some = next(t for t in tensors.values() if t is not None)
        return _unwrap(tuple(gradients[name] if name in gradients else some.new_empty(0) for name in op.grads))

    return backward


def _gradients(
    op: Declaration,
    backend: str,
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    options: Mapping[str, object],
    needs: Sequence[bool],
) -> dict[str, Tensor]:
    """The needed gradients of op.grads, from the gradients of the visible results and the residuals."""
    module = op.backend(backend)
    module = module if hasattr(module, "backward") else op.reference
    wanted = [name for name, need in zip(op.grads, needs, strict=True) if need]

    def compute() -> tuple[Tensor, ...]:
        cotangents, stored = as_stored(grads), as_stored(tensors)
        named = dict(zip(op.residuals, stored, strict=True))
        with undisturbed(tuple(stored)):
            gradients = module.backward(
                dict(zip(op.outputs, cotangents, strict=True)), named, dict(options), frozenset(wanted)
            )
        return fresh([gradients[name] for name in wanted], (*cotangents, *stored))

    if not getattr(module, "LAUNCHES_ONLY", False):
        return dict(zip(wanted, compute(), strict=True))
    what = (module, "backward", tuple(wanted), tuple(options.items()), tuple(map(type, options.values())))
    return dict(zip(wanted, repeated(what, (*grads, *tensors), compute), strict=True))


def _backward_fake(op: Declaration) -> Any:
    def fake(*args: object) -> Any:
        _, tensors, _, flags, _ = _backward_split(op, args)
        needs = [name for name, need in zip(op.grads, flags, strict=True) if need]
        some = next(t for t in tensors.values() if t is not None)
        return _unwrap(
            tuple(
                torch.empty(tensors[g].shape, dtype=tensors[g].dtype, device=tensors[g].device)
                if g in needs
                else some.new_empty(0)
                for g in op.grads
            )
        )

    return fake


def _keep_nothing(ctx: object, inputs: tuple[object, ...], output: object) -> None:
    """Save nothing: the backward operator has no derivative."""


def _no_second_derivative(op: Declaration) -> Any:
    def backward(ctx: object, *grads: object) -> Any:
        raise NotImplementedError(
            f"{op.name}: second derivatives are not supported. If you need one, use plain "
            f"torch: `from {op.package}.reference import forward`, which takes {', '.join(op.inputs)} and the options "
            f"{', '.join(op.options)} by name."
        )

    return backward
