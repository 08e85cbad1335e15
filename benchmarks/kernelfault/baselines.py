"""Verdicts of the usual rules on the same kernels, compared with the golden run in torch, as a test's author would.

A rule returns whether it rejects the kernel, or None where it does not apply. Gradients are compared too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from goldsmith.assay.execute.records import CandidateRun, RunSettings
from goldsmith.assay.execute.run import execute
from goldsmith.assay.judge.examination import Examination

from .baseline_names import RULES

_SEED = 0


def rejected(
    make: Callable[[], Any], case: str, seed: int, dtype: str = "", op: Any = None, *, interpreted: bool = False
) -> dict[str, bool | None]:
    """rule -> whether it rejects the kernel in this case.

    gradcheck is left out in Triton's interpreter, where it takes a minute per kernel.
    """
    target = make()
    chosen = target.case(case)
    wanted = getattr(torch, dtype) if dtype else target.dtypes[0]
    examination = Examination(target, chosen, wanted, "cpu", seed, frozenset(), case)
    state = torch.random.get_rng_state()
    execution = execute(examination.material, RunSettings(fill="zero"))
    rejections: dict[str, bool | None] = dict.fromkeys(RULES)
    if execution.error is not None:
        rejections |= dict.fromkeys(RULES[:4], True)
    else:
        rejections |= _compared(examination, execution)
    rejections["gradcheck"] = None if interpreted else _gradcheck(make, case, seed)
    rejections["opcheck"] = None if op is None else _opcheck(op, examination)
    torch.random.set_rng_state(state)
    return rejections


def name_results(result: Any, names: tuple[str, ...] | None) -> dict[str, Tensor]:
    """The results of a call, by output name."""
    if isinstance(result, dict):
        return {n: t for n, t in result.items() if t is not None}
    values = list(result) if isinstance(result, tuple | list) else [result]
    known = names or ("y",) if len(values) == 1 else names or tuple(f"y{i}" for i in range(len(values)))
    return {n: t for n, t in zip(known, values, strict=True) if t is not None}


def name_gradients(result: Any, wanted: tuple[str, ...]) -> dict[str, Tensor | None]:
    """The gradients of a backward, by input name."""
    return {n: result.get(n) for n in wanted} if isinstance(result, dict) else dict(zip(wanted, result, strict=True))


def _compared(examination: Examination, run: CandidateRun) -> dict[str, bool]:
    ours = {n: t for n, k, t in run.results() if k != "saved"}
    plain = _golden(examination, run, None)
    exact = _golden(examination, run, torch.float64)
    pairs = [(t, plain[n], exact[n]) for n, t in ours.items() if n in plain and plain[n] is not None]
    return {
        "assert_close": any(_not_close(y, g) for y, g, _ in pairs),
        "allclose_1e-2": any(not _allclose(y, g, 1e-2) for y, g, _ in pairs),
        "twice_torch": any(_worse_than_twice(y, g, e) for y, g, e in pairs),
        "calc_diff_1e-3": any(not _calc_diff(y, e) < 1e-3 for y, _, e in pairs),
    }


def _golden(examination: Examination, run: CandidateRun, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    """Outputs and gradients of the golden in this dtype; None: the dtype of the inputs."""
    target, material = examination.target, examination.material

    def cast(t: Tensor) -> Tensor:
        return t.detach().clone() if dtype is None or not t.is_floating_point() else t.detach().to(dtype)

    inputs = {n: cast(t) for n, t in material.inputs.items()}
    wanted = target.wanted_grads(inputs) if target.backward is not None and run.cotangents else ()
    for name in wanted:
        inputs[name].requires_grad_()
    supply = {**inputs, **material.scalars}
    result = name_results(target.bound("golden", supply)(supply), target.outputs)
    out: dict[str, Tensor | None] = {n: t.detach() for n, t in result.items() if n not in target.saved}
    sent = {n: cast(c) for n, c in run.cotangents.items() if n in result}
    if not wanted or not sent:
        return out
    if target.golden_backward is not None:
        names = {**supply, **result, **{f"grad_{n}": c for n, c in sent.items()}}
        grads = name_gradients(target.bound("golden_backward", names)(names), wanted)
    else:
        results = {n: result[n] for n in sent if result[n].requires_grad}
        cotangents = [sent[n].to(results[n].dtype) for n in results]
        got = torch.autograd.grad(list(results.values()), [inputs[n] for n in wanted], cotangents, allow_unused=True)
        grads = dict(zip(wanted, got, strict=True))
    return {**out, **{f"{n}.grad": g for n, g in grads.items()}}


# the rules


def _not_close(y: Tensor | None, g: Tensor) -> bool:
    if y is None:
        return bool(g.any())
    try:
        torch.testing.assert_close(y, g.to(y.dtype))
    except AssertionError:
        return True
    return False


def _allclose(y: Tensor | None, g: Tensor, tolerance: float) -> bool:
    if y is None or y.shape != g.shape:
        return y is None and not bool(g.any())
    return bool(torch.allclose(y.double(), g.double(), rtol=tolerance, atol=tolerance))


def _worse_than_twice(y: Tensor | None, g: Tensor, exact: Tensor) -> bool:
    """The rule of FlashAttention: max |y - exact| <= 2 max |torch in the same precision - exact|"""
    if y is None or y.shape != exact.shape or not y.numel():
        return y is None and bool(exact.any())
    if not y.is_floating_point():
        return not torch.equal(y, g)
    error, theirs = (y.double() - exact.double()).abs().max(), (g.double() - exact.double()).abs().max()
    return not bool(error <= 2 * theirs)


def _calc_diff(y: Tensor | None, exact: Tensor) -> float:
    """The measure of DeepGEMM: 1 - 2 <x, y> / (<x, x> + <y, y>)"""
    if y is None or y.shape != exact.shape:
        return 1.0 if y is not None or bool(exact.any()) else 0.0
    a, b = y.double(), exact.double()
    total = float((a * a + b * b).sum())
    return 1.0 - 2.0 * float((a * b).sum()) / total if total else 0.0


def _gradcheck(make: Callable[[], Any], case: str, seed: int) -> bool | None:
    """torch.autograd.gradcheck in float64, fast mode; None where there is no backward."""
    target = make()
    if target.backward is None:
        return None
    chosen = target.case(case)
    examination = Examination(target, chosen, torch.float64, "cpu", seed, frozenset(), case)
    material = examination.material
    names = target.wanted_grads(material.inputs)
    leaves = [material.inputs[n].detach().double().requires_grad_() for n in names]

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Tensor) -> Any:
            supply = {**material.supply, **dict(zip(names, arguments, strict=True))}
            results = name_results(target.bound("candidate", supply)(supply), target.outputs)
            ctx.supply, ctx.results = supply, results
            ctx.visible = [n for n, t in results.items() if n not in target.saved and t.is_floating_point()]
            return tuple(results[n] for n in ctx.visible)

        @staticmethod
        def backward(ctx: Any, *sent: Tensor) -> Any:
            named = {**ctx.supply, **ctx.results, **{f"grad_{n}": g for n, g in zip(ctx.visible, sent, strict=True)}}
            grads = name_gradients(target.bound("backward", named)(named), names)
            return tuple(grads[n] for n in names)

    def direct(*arguments: Tensor) -> Any:
        supply = {**material.supply, **dict(zip(names, arguments, strict=True))}
        results = name_results(target.bound("candidate", supply)(supply), target.outputs)
        return tuple(t for n, t in results.items() if n not in target.saved and t.requires_grad)

    call = direct if target.backward == "auto" else Whole.apply
    torch.manual_seed(_SEED)
    try:
        return not torch.autograd.gradcheck(call, leaves, fast_mode=True, nondet_tol=0.0)
    except Exception:  # noqa: BLE001  any exception is a rejection
        return True


def _opcheck(op: Any, examination: Examination) -> bool:
    """torch.library.opcheck on the registered operator, with gradients."""
    material = examination.material
    tensors = [material.inputs.get(n) for n in op.inputs]
    tensors = [
        t if t is None or n not in op.grads or not t.is_floating_point() else t.detach().clone().requires_grad_()
        for n, t in zip(op.inputs, tensors, strict=True)
    ]
    options = [material.scalars[n] for n in op.options]
    with contextlib.redirect_stdout(None):
        try:
            torch.library.opcheck(op._custom, (*tensors, *options, "reference"))
        except Exception:  # noqa: BLE001  any exception is a rejection
            return True
    return False
