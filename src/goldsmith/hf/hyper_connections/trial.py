"""Tries a class of transformers beside ours, so that a formula that a later version changes is refused.

A connection or head runs on a few numbers. A layer runs with stubs in place of its attention and MLP, which record how
they are called; its hyper-connections are small ones. This takes a few milliseconds for each kind of module.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .families import Known, known

DIM = 4


def check_formulas(path: str, module: nn.Module, of: Known) -> None:
    """Raises ValueError if the forward of transformers' own class computes something else than ours."""
    why = "computes something else"
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        try:
            same = _same(_run(module, of, theirs=True), _run(module, of, theirs=False))
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            same, why = False, f"cannot be tried ({type(error).__name__}: {error})"
    if not same:
        from transformers import __version__

        raise ValueError(
            f"goldsmith.hf.apply: {path} is a {of.kind.__name__}, which {why} in transformers {__version__}; the "
            "formulas of 5.17 to 5.23 are known"
        )


def _run(module: nn.Module, of: Known, *, theirs: bool) -> list[object]:
    """The outputs of a small module of this class, or of ours, and the calls of its parts."""
    calls: list[object] = []
    small = _layer(module, of, calls) if of.part == "layer" else _small(module, of)
    for one in small.modules():
        inner = known(one)
        if inner is not None and not theirs:
            one.__class__ = inner.ours
    x = _numbers(1, 3, _streams(module), DIM)
    arguments = {name: f"<{name}>" for name in _names(of)} if of.part == "layer" else {}
    outputs = small(x.flatten(-2) if of.family.flat else x, **arguments)
    return [*(outputs if isinstance(outputs, tuple) else (outputs,)), *calls]


def _layer(layer: nn.Module, of: Known, calls: list[object]) -> nn.Module:
    """A layer of transformers' class with this one's settings, small hyper-connections and stubs."""
    shell = _empty(of.kind)
    vars(shell).update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
    for name, child in layer.named_children():
        inner = known(child)
        outputs = of.family.attention if name == "self_attn" and not _is_linear(layer) else 1
        shell.add_module(name, _Stub(name, outputs, calls) if inner is None else _small(child, inner))
    return shell.eval()


def _small(module: nn.Module, of: Known) -> nn.Module:
    """A connection or head of transformers' class with this one's settings and other, smaller weights."""
    it: Any = module
    norm = it.hc_norm if hasattr(module, "hc_norm") else it.input_norm
    config = SimpleNamespace(
        hidden_size=DIM,
        rms_norm_eps=norm.eps,
        hc_mult=_streams(module),
        hc_count=_streams(module),
        hc_lowrank=3,
        hc_sinkhorn_iters=getattr(module, "hc_sinkhorn_iters", None),
        hc_eps=getattr(module, "hc_eps", getattr(module, "eps", None)),
        hc_magnitude=getattr(module, "hc_post_magnitude", None),
    )
    options = {} if getattr(module, "block_inject_weight", True) is not None else {"use_combine": False}
    small = of.kind(config, **options)
    for number, parameter in enumerate(small.parameters(), 1):
        parameter.copy_(0.5 * _numbers(*parameter.shape, step=0.7 + number))
    return small.eval()


def _streams(module: nn.Module) -> int:
    sizes = (getattr(one, "hc_mult", getattr(one, "hc_count", None)) for one in module.modules() if known(one))
    return next(size for size in sizes if size is not None)


def _empty(kind: type[nn.Module]) -> nn.Module:
    shell = kind.__new__(kind)
    nn.Module.__init__(shell)
    return shell


def _is_linear(layer: nn.Module) -> bool:
    return getattr(layer, "block_type", None) == "linear_attention"


def _names(of: Known) -> list[str]:
    """The arguments of the layer's forward after the streams, and one that its parts take."""
    named = list(inspect.signature(inspect.unwrap(of.kind.forward)).parameters.values())[2:]
    return [p.name if p.kind is not p.VAR_KEYWORD else "another" for p in named]


class _Stub(nn.Module):
    """sin(3 x + c) in place of a part of the layer, and a record of the call."""

    def __init__(self, name: str, outputs: int, calls: list[object]) -> None:
        super().__init__()
        self.name, self.outputs, self.calls = name, outputs, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *rest = args or (kwargs.pop("hidden_states"),)
        self.calls.append((self.name, rest, kwargs))
        f = torch.sin(3 * x + len(self.name))
        return (f, *(f"{self.name} {i}" for i in range(1, self.outputs))) if self.outputs > 1 else f


def _numbers(*shape: int, step: float = 1.3) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * step).reshape(shape)


def _same(theirs: list[object], ours: list[object]) -> bool:
    return len(theirs) == len(ours) and all(_equal(a, b) for a, b in zip(theirs, ours, strict=True))


def _equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    # a loose tolerance: this distinguishes formulas, it does not judge rounding
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-3, atol=1e-3)
