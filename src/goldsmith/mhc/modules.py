"""Hyper-connections as modules, with DeepSeek's names, shapes and state-dict keys."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.autograd import transformed
from ..core.shapes import ShapeError, check_choice, kind
from ._common import FLOATS, FORMS, KINDS, ORIENTATIONS, check_flag, check_numbers, check_rms_form, mixes_of
from ._connection import ConnectionSettings, enter, leave
from ._recomputation import Region
from .head.op import HEAD
from .pre.op import PRE

Mixing = tuple[Tensor, Tensor, Tensor, Tensor | None]  # phi, alpha, bias, gamma
Output = Tensor | tuple[object, ...]  # x_next, or (x_next, *rest)
INITS = ("deepseek", "small", "identity", "hy_v4")


class HeadOptions(TypedDict):
    """Keyword arguments of HEAD."""

    rms_eps: float
    pre_eps: float
    backend: str


class _Float32Module(nn.Module):
    """A module whose own parameters stay in float32 when a whole model is moved to a 16-bit dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Float32Module:
        if recurse:
            for child in self.children():
                child._apply(fn)

        def keep(t: Tensor) -> Tensor:
            moved = fn(t)
            narrowed = t.is_floating_point() and moved.is_floating_point() and moved.element_size() < 4
            return t.to(moved.device, torch.float32) if narrowed and t.element_size() >= 4 else moved

        return super()._apply(keep, recurse=False)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.is_floating_point():  # needed for assign=True only
                state_dict[prefix + name] = value.to(parameter.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


class HyperConnection(_Float32Module):
    """h_in, h_post, h_res = pre(x);  f = layer(norm(h_in));  x_next = post(x, f, h_post, h_res)

    x [..., n, dim] -> x_next, the same shape. `layer` returns f [..., dim], or (f, *rest): then forward returns
    (x_next, *rest). Further arguments of forward go to `layer`. Parameters fn [M, n*dim], base [M], scale [3] (M = 2n +
    n^2; the operators' phi, bias, alpha) and, with gamma=True, norm_weight [n*dim]; always float32, also after
    `.to(bfloat16)`.

    kind="independent" (HY-V4) has no h_res: x_next[i] = x[i] + h_post[i] f. Its h_post is magnitude * sigmoid +
    post_eps (2.0 and 1e-6 unless given; a manifold connection takes neither); fn [2n, n*dim], base [2n], scale [2].

    init: "deepseek" draws fn from N(0, 0.02^2), base 0, scale 1; "small" has scale 0.01; "identity" is "small" with
    8 on the diagonal of base's matrix, so that streams start almost separate; "hy_v4" is "small" with -log(n - 1) in
    pre's base. coefficient_dtype: h_post and h_res
    are rounded to it before post (bfloat16: as HF's DeepseekV4 does). recompute=True keeps only x, f and the layer's
    own saved tensors for the backward; it recomputes the coefficients, h_in and norm(h_in) bit for bit, so gradients
    are identical. A norm that draws random numbers or writes to its own buffers or attributes is called only once, and
    the connection keeps its results. Hooks of a norm that is called again run again. orientation, form and the numbers:
    see `mhc.post`, `mhc.sinkhorn`, `mhc.coefficients`. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: Xie et al. 2026, mHC; huggingface/transformers deepseek_v4 and hy_v4.
    """

    def __init__(
        self,
        dim: int,
        layer: Callable[..., object],
        *,
        n: int = 4,
        norm: Callable[[Tensor], Tensor] | None = None,
        gamma: bool = False,
        rms_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        post_mult: float = 2.0,
        iterations: int = 20,
        sinkhorn_eps: float = 1e-6,
        form: str = "deepseek",
        orientation: str = "in_out",
        kind: str = "manifold",
        magnitude: float | None = None,
        post_eps: float | None = None,
        rms_form: str = "inside",
        init: str = "deepseek",
        coefficient_dtype: torch.dtype | None = None,
        recompute: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        name = "mhc.HyperConnection"
        self.dim, self.n = sizes(name, dim=dim, n=n)
        check_choice(name, "kind", kind, KINDS)
        if kind == "independent":
            post_mult = 2.0 if magnitude is None else magnitude
            post_eps = 1e-6 if post_eps is None else post_eps
        elif magnitude is not None or post_eps is not None:
            raise ValueError(f"{name}: magnitude={magnitude!r}, post_eps={post_eps!r} need kind='independent'")
        check_numbers(
            name,
            rms_eps=rms_eps,
            pre_eps=pre_eps,
            post_mult=post_mult,
            iterations=iterations,
            sinkhorn_eps=sinkhorn_eps,
            post_eps=post_eps or 0.0,
        )
        check_choice(name, "form", form, FORMS)
        check_rms_form(name, rms_form)
        check_choice(name, "orientation", orientation, ORIENTATIONS)
        check_choice(name, "init", init, INITS)
        check_choice(name, "backend", backend, ("auto", *PRE.backends))
        check_choice(name, "coefficient_dtype", coefficient_dtype, (None, *FLOATS[:3]))
        check_flag(name, "recompute", recompute)
        check_flag(name, "gamma", gamma, "" if not isinstance(gamma, Tensor) else "; its values: load norm_weight")
        for argument, function, of in (("layer", layer, "h_in"), ("norm", norm, "h_in, or None")):
            if not callable(function) and not (argument == "norm" and function is None):
                raise TypeError(
                    f"{name}: {argument} is of type {type(function).__name__}, expected a module or function of {of}"
                )
        self.layer, self.norm, self.recompute, self.init = layer, norm, recompute, init
        self.settings = ConnectionSettings(
            rms_eps, pre_eps, post_mult, iterations, sinkhorn_eps, form, orientation, coefficient_dtype, backend,
            kind, post_eps or 0.0, rms_form,
        )  # fmt: skip
        groups = 2 if kind == "independent" else 3
        self.fn = _parameter(device, mixes_of(n, groups), n * dim)
        self.base = _parameter(device, mixes_of(n, groups))
        self.scale = _parameter(device, groups)
        self.norm_weight = _parameter(device, n * dim) if gamma else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=0.02)
        self.base.zero_()
        self.scale.fill_(1.0 if self.init == "deepseek" else 0.01)
        if self.init == "hy_v4":
            self.base[: self.n] = -math.log(max(self.n - 1, 1))
        if self.init == "identity" and self.settings.kind == "manifold":
            self.base[2 * self.n :: self.n + 1] = 8.0
        if self.norm_weight is not None:
            self.norm_weight.fill_(1.0)

    @property
    def mixing(self) -> Mixing:
        """(phi, alpha, bias, gamma), in the operators' order."""
        gamma = None if self.norm_weight is None else precise(self.norm_weight)
        return self.fn, precise(self.scale), precise(self.base), gamma

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Output:
        check_x("mhc.HyperConnection", x, self.n, self.dim)
        if self.recompute and torch.is_grad_enabled() and not transformed():
            if not torch.compiler.is_compiling():
                return self._recomputed(x, args, kwargs)
            # saved-tensor hooks do not work in a compiled graph; the compiler plans the recomputation itself
            built = checkpoint(self._enter, x, self.mixing, self.norm, use_reentrant=False, preserve_rng_state=False)
            _, h, h_post, h_res, token = built
        else:
            _, h, h_post, h_res, token = self._enter(x, self.mixing, self.norm)
        f, rest = split(self.layer(h, *args, **kwargs))
        return join(leave(x, f, h_post, h_res, token, self.settings), rest)

    def _enter(
        self, x: Tensor, mixing: Mixing, norm: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        h_in, h_post, h_res, token = enter(x, *mixing, self.settings)
        return h_in, normed(h_in, norm), h_post, h_res, token

    def _recomputed(self, x: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Output:
        mixing, norm = self.mixing, _as_it_is_now(self.norm)
        kept = (x, *(p for p in mixing if p is not None))
        region = Region(
            lambda: tuple(t for t in self._enter(x, mixing, norm) if t is not None), kept, self.norm
        )  # fmt: skip
        _, h, h_post, *h_res, token = region.run()
        with region.watching():
            f, rest = split(self.layer(h, *args, **kwargs))
            return join(leave(x, f, h_post, h_res[0] if h_res else None, token, self.settings), rest)

    def extra_repr(self) -> str:
        options = {"init": self.init, "recompute": self.recompute}
        options |= {k: v for k, v in vars(self.settings).items() if v != getattr(ConnectionSettings(), k)}
        return ", ".join([f"dim={self.dim}, n={self.n}", *(f"{k}={v!r}" for k, v in options.items())])


class HyperHead(_Float32Module):
    """h = sum_i (sigmoid(hc_scale * z[i] + hc_base[i]) + pre_eps) * x[i],   z = rsqrt(mean(X^2) + rms_eps) * X hc_fn^T

    x [..., n, dim] -> [..., dim], at the end of the model. Parameters hc_fn [n, n*dim], hc_base [n], hc_scale [1],
    always float32. `init` as in HyperConnection ("identity" means "small" here). Source: huggingface/transformers
    deepseek_v4.
    """

    def __init__(
        self,
        dim: int,
        *,
        n: int = 4,
        rms_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        init: str = "deepseek",
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.n = sizes("mhc.HyperHead", dim=dim, n=n)
        check_numbers("mhc.HyperHead", rms_eps=rms_eps, pre_eps=pre_eps)
        check_choice("mhc.HyperHead", "init", init, INITS)
        check_choice("mhc.HyperHead", "backend", backend, ("auto", *HEAD.backends))
        self.init = init
        self.settings: HeadOptions = {"rms_eps": rms_eps, "pre_eps": pre_eps, "backend": backend}
        self.hc_fn = _parameter(device, n, n * dim)
        self.hc_base = _parameter(device, n)
        self.hc_scale = _parameter(device, 1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.hc_fn, std=0.02)
        self.hc_base.zero_()
        self.hc_scale.fill_(1.0 if self.init == "deepseek" else 0.01)

    def forward(self, x: Tensor) -> Tensor:
        check_x("mhc.HyperHead", x, self.n, self.dim)
        return HEAD(x, self.hc_fn, precise(self.hc_scale), precise(self.hc_base), None, **self.settings)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, n={self.n}"


def _as_it_is_now(norm: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """The norm bound to its current weights: `torch.func.functional_call` removes them before the backward."""
    if not isinstance(norm, nn.Module):
        return norm
    now = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}

    def call(h: Tensor) -> Tensor:
        later = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
        same = all(value is now[name] for name, value in later.items())
        return norm(h) if same else torch.func.functional_call(norm, now, (h,))

    return call


def normed(h_in: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
    h = h_in if norm is None else norm(h_in)
    if not isinstance(h, Tensor):
        raise TypeError(f"mhc.HyperConnection: norm returned a {type(h).__name__}, expected one tensor")
    return h


def split(output: object) -> tuple[Tensor, tuple[object, ...]]:
    """(f, rest) of a layer's output f or (f, *rest)."""
    f, rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) and output else (output, ())
    if not isinstance(f, Tensor):
        raise TypeError(
            f"mhc.HyperConnection: layer returned a {type(f).__name__}, expected f [*batch, dim] or (f, *rest)"
        )
    return f, rest


def join(x_next: Tensor, rest: tuple[object, ...]) -> Output:
    return (x_next, *rest) if rest else x_next


def sizes(module: str, **given: int) -> tuple[int, ...]:
    for name, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{module}: {name}={size!r}, expected a whole number of at least 1")
    return tuple(given.values())


def _parameter(device: torch.device | str | None, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))


def precise(parameter: Tensor) -> Tensor:
    """The parameter in float32 or better; warns once where a mixed-precision policy has rounded it to 16 bits."""
    if parameter.element_size() >= 4:
        return parameter
    if not torch.compiler.is_compiling():
        _warn_of_rounding(parameter.dtype)
    return parameter.float()


@functools.cache
def _warn_of_rounding(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    warnings.warn(
        f"mhc: a mixed-precision policy casts the parameters of hyper-connections to {name}. They are used in float32, "
        "but rounded. To keep them whole, shard with goldsmith.distributed.shard, which takes fully_shard's arguments",
        stacklevel=4,
    )


def check_x(module: str, x: Tensor, n: int, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{module}: x is {kind(x)}, expected a torch.Tensor")
    if tuple(x.shape[-2:]) == (n, dim):
        return
    hint = ""
    if tuple(x.shape[-2:]) == (dim, n):
        hint = "; its streams are innermost: use mhc.streams_from_te"
    elif x.dim() and x.shape[-1] == dim:
        hint = f"; to widen a single stream use mhc.expand(x, {n})"
    raise ShapeError(f"{module}: x is {list(x.shape)}, expected [*batch, n={n}, dim={dim}]{hint}")
