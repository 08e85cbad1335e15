"""Which edit of the golden reproduces the numbers of the ranks: the cause of a wrong sharded result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .causes import RankFinding
from .edits import RankEdit, Results, edits
from .layout import Coordinates, assembled, coordinates, part
from .plain_step import PlainStep, Values

NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}
NEAR_16_BITS = 5e-2
BETTER = 0.1  # how close an edit must be, of the golden's own distance
BUDGET_S = 60.0  # after which no further edit is tried
CACHED_ELEMENTS = 200_000  # of inputs: results of edits are kept for the next tensor of smaller cases
MOST_PROOFS = 6  # proofs tried for one tensor; a proof costs a check of the edited golden

Parts = Mapping[str, Sequence[Tensor | None]]
Proof = Callable[[str, Coordinates, Callable[[Values], Tensor]], bool]


def explain(
    step: PlainStep,
    parts: Parts,
    wrong: Mapping[str, Sequence[Coordinates]],
    proof: Proof,
    unfilled: Callable[[], Parts],
) -> list[RankFinding]:
    """One finding for each wrong tensor that can be explained, the most telling first.

    parts   {name: what every rank returned}
    wrong   {name: the ranks, one for each different replica, whose whole tensor is wrong}
    proof   whether the ranks' tensor, seen from a rank, passes the assay against this edited golden
    unfilled  runs the ranks again, with unwritten memory as it comes instead of NaN
    """
    double = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in step.values.items()}
    right = step(double)
    findings = []
    candidates = list(edits(step)) if wrong else []
    cache: dict[tuple[int, Coordinates], Results | None] = {}
    until = time.monotonic() + BUDGET_S
    for name in wrong:
        finding = _missing(step, name, parts[name], right[name]) or _unwritten(
            step, name, parts[name], right[name], unfilled
        )
        finding = finding or _reproduced(step, name, parts[name], right[name], candidates, double, cache, proof, until)
        finding = finding or _by_rank(step, name, parts[name], right[name])
        if finding is not None:
            findings.append(finding)
    return sorted(findings, key=lambda f: not f.proven)


def _near(dtype: torch.dtype) -> float:
    return NEAR.get(dtype, NEAR_16_BITS)


def _missing(step: PlainStep, name: str, copies: Sequence[Tensor | None], right: Tensor) -> RankFinding | None:
    """None or zeros on some ranks only, where all should have the same numbers."""
    if any(p.is_shard() or p.is_partial() for p in step.placed(name)) and all(t is not None for t in copies):
        return None
    without = [r for r, t in enumerate(copies) if t is None or not t.any()]
    if not without or len(without) == len(copies) or not right.any():
        return None
    having = [r for r in range(len(copies)) if r not in without]
    kind = "None" if any(copies[r] is None for r in without) else "zeros"
    text = f"{_with(having, 'has', 'have')} {name}, {_with(without, 'has', 'have')} {kind}"
    return RankFinding("gradient_on_one_rank", name, text, True)


def _unwritten(
    step: PlainStep, name: str, copies: Sequence[Tensor | None], right: Tensor, unfilled: Callable[[], Parts]
) -> RankFinding | None:
    """NaN, because memory that nobody wrote holds NaN in these runs."""
    if not right.isfinite().all() or all(t is None or t.isfinite().all() for t in copies):
        return None
    ids = [n for n, v in step.values.items() if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64)]
    if not ids:
        return None
    bad = [r for r, t in enumerate(copies) if t is not None and not t.isfinite().all()]
    text = (
        f"{name} has NaN or Inf on {ranks_text(bad)}, where the golden is finite. Memory that no kernel writes holds "
        f"NaN in these runs, so rows that {', '.join(ids)} sends to no expert of the rank were read"
    )
    again = unfilled().get(name, ())
    finite = bool(again) and all(t is not None and t.isfinite().all() for t in again)
    text += ". In a run that leaves such memory as it comes, they are finite" if finite else ""
    return RankFinding("sentinel_leak", name, text, finite)


def _reproduced(
    step: PlainStep, name: str, copies: Sequence[Tensor | None], right: Tensor, candidates: list[RankEdit],
    double: Values, cache: dict[tuple[int, Coordinates], Results | None], proof: Proof, until: float,
) -> RankFinding | None:  # fmt: skip
    places, placed = coordinates(step.sizes), step.placed(name)
    tensors = [t for t in copies if t is not None]
    if len(tensors) < len(copies) or any(p.is_partial() for p in placed) or not right.is_floating_point():
        return None
    near = []
    shares = [part(right, placed, at, step.sizes) for at in places]
    if any(t.shape != share.shape for t, share in zip(tensors, shares, strict=True)):
        return None
    wrong_by = max(_distance(t.double(), share, right) for t, share in zip(tensors, shares, strict=True))
    closest = min(_near(tensors[0].dtype), BETTER * wrong_by)  # an edit that changes nothing explains nothing
    small = sum(t.numel() for t in double.values() if isinstance(t, Tensor)) < CACHED_ELEMENTS
    for index, edit in enumerate(candidates):
        if time.monotonic() > until:
            break
        if not small:
            cache.clear()
        distance = 0.0
        for at, own in zip(places, tensors, strict=True):
            key = (index, places[0] if edit.alike else at)
            if key not in cache:
                cache[key] = _results(edit, double, key[1])
            expected = _share(cache[key], name, edit, right, placed, at, step.sizes)
            if expected is None or expected.shape != own.shape:
                distance = math.inf
                break
            distance = max(distance, _distance(own.double(), expected, right))
        if distance < closest:
            near.append((distance, index, edit))
    close = [edit for _, _, edit in sorted(near, key=lambda row: row[1])][:MOST_PROOFS]  # the simpler ones first
    for edit in close:
        viewers = views(tensors, placed, step.sizes)
        if all(proof(name, view, _whole(step, name, edit, right, view)) for view in viewers):
            return RankFinding(edit.cause, name, edit.text.format(name=name), True)
    if close:
        return RankFinding(close[0].cause, name, close[0].text.format(name=name), False)
    return None


def _results(edit: RankEdit, values: Values, at: Coordinates) -> Results | None:
    try:
        return edit.on(values, at)
    except Exception:  # noqa: BLE001  a golden may refuse the inputs of an edit, which then explains nothing
        return None


def _share(
    results: Results | None,
    name: str,
    edit: RankEdit,
    right: Tensor,
    placed: tuple,
    at: Coordinates,
    sizes: Sequence[int],
) -> Tensor | None:
    if results is None or name not in results:
        return None
    if edit.whole or results[name].shape == right.shape:
        return part(results[name], placed, at, sizes)
    return None


def _whole(step: PlainStep, name: str, edit: RankEdit, right: Tensor, view: Coordinates) -> Callable[[Values], Tensor]:
    """The edited golden as a function of the case's values: the tensor that the rank `view` sees."""
    placed, places = step.placed(name), coordinates(step.sizes)

    def golden(values: Values) -> Tensor:
        if edit.alike:
            return edit.on(values, view)[name]
        shares = [part(edit.on(values, at)[name], placed, at, step.sizes) for at in places]
        return assembled(shares, placed, step.sizes, view)

    return golden


def views(tensors: Sequence[Tensor], placed: tuple, sizes: Sequence[int]) -> list[Coordinates]:
    """A rank for each different replica of the whole tensor."""
    distinct: list[tuple[Coordinates, Tensor]] = []
    for at in coordinates(sizes):
        whole = assembled(tensors, placed, sizes, at)
        if not any(_same(whole, other) for _, other in distinct):
            distinct.append((at, whole))
    return [at for at, _ in distinct]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _distance(own: Tensor, expected: Tensor, right: Tensor) -> float:
    if not own.numel():
        return 0.0
    if not own.isfinite().all():
        return math.inf
    scale = max(float(expected.abs().max()), float(right.abs().max()) * 1e-6, 1e-300)
    return float((own - expected).abs().max()) / scale


def _by_rank(step: PlainStep, name: str, copies: Sequence[Tensor | None], right: Tensor) -> RankFinding | None:
    """No edit fits: say which ranks are wrong."""
    placed, places = step.placed(name), coordinates(step.sizes)
    tensors = [t for t in copies if t is not None]
    if len(tensors) < len(copies) or not right.is_floating_point():
        return None
    shares = [part(right, placed, at, step.sizes) for at in places]
    if any(t.shape != share.shape for t, share in zip(tensors, shares, strict=True)):
        return None
    far = [
        r
        for r, (t, s) in enumerate(zip(tensors, shares, strict=True))
        if _distance(t.double(), s, right) > _near(t.dtype)
    ]
    near = [r for r in range(len(copies)) if r not in far]
    if not any(p.is_shard() or p.is_partial() for p in placed):
        if len(views(tensors, placed, step.sizes)) > 1:
            apart = "every rank has other numbers"
            if near and far:
                apart = f"{_with(near, 'agrees', 'agree')} with the golden, {_with(far, 'does', 'do')} not"
            text = f"{name} should be the same on all ranks; {apart}"
            return RankFinding("differs_between_ranks", name, text, True)
        return None
    if near and far:
        text = f"of {name}, only what {_with(far, 'has', 'have')} is wrong"
        return RankFinding("own_bias", name, text, False)
    return None


def ranks_text(ranks: Sequence[int]) -> str:
    numbers = [str(r) for r in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _with(ranks: Sequence[int], one: str, many: str) -> str:
    """The ranks with a verb: "rank 1 has", "ranks 1 and 2 have"."""
    return f"{ranks_text(ranks)} {one if len(ranks) == 1 else many}"
