"""Does the candidate hear that an input has changed? A copy that is kept by address, sum or first element does not.

reordered   the numbers of one input in another order, written into the same tensor between two calls: its address, its
            shape, its first and last element, its sum and its largest number stay what they were; or written into a new
            tensor that has the id of the one before it; indices and masks are another draw's, since in another order
            they may point anywhere
small       with all inputs times 2^-12, one of them moved a little: what is flushed to zero or rounded to fixed steps
            stays where it is, bit for bit; what an epsilon is added to moves
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.memory import Arena
from ..execute.memory_marks import ZERO_FILL
from ..execute.run import Material, RunSettings
from ..golden.golden_error import GoldenError
from ..golden.golden_results import GoldenResults
from ..judge.examination import Examination
from ..probes.slices import own_decisions
from .evidence import Evidence
from .rules.reading import Reading
from .runs import changed, nudge

PROBE = "kept inputs"
_SMALL = 2.0**-12
_MOST = 4  # inputs that are looked at
_TRIES = 16  # tensors that are made until one has a given id
_HALF = 0.5  # of what the golden moves: as much stays where it is


def unheard(examination: Examination, evidence: Evidence, spent: Callable[[], bool] = lambda: False) -> None:
    """Asks both of a case, where its evidence gives a reason to."""
    r = Reading(evidence)
    if not r.plain_wrong or any(not fact.same for fact in r.runs("repeat")) or r.right("second call"):
        evidence.kept = kept(examination, spent)
    if not r.plain_wrong and not evidence.kept and r.fails("scale 2^-12") is not None:
        evidence.deaf = deaf(examination, spent)


def kept(examination: Examination, spent: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """Input -> a sentence, of those whose other numbers at the same address give the first result, bit for bit.

    Four runs of the candidate's forward for every floating input, and for all others at once, which may only go with
    one another; one more for each result that stays as it was and is wrong, and one of the golden.
    """
    found: dict[str, str] = {}
    for other in _others(examination):
        if spent() or examination.target.mutates:
            break
        same = all(torch.equal(t, examination.material.inputs[n]) for n, t in other.items())
        said = None if same else _kept(examination, other)
        if said is not None:
            found |= dict.fromkeys(other, said)
    return found


def _others(examination: Examination) -> Iterator[dict[str, Tensor]]:
    """Other numbers of one input, or of several: floating ones in another order, indices and masks of another draw."""
    for name, tensor in _inputs(examination):
        yield {name: reordered(tensor)}
    mine = {n: t for n, t in examination.material.inputs.items() if not t.is_floating_point() and t.numel()}
    drawn = examination.variant(1).inputs if mine else {}
    if mine and all(n in drawn and drawn[n].shape == t.shape and drawn[n].dtype == t.dtype for n, t in mine.items()):
        yield {n: drawn[n] for n in mine}


def deaf(examination: Examination, spent: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Input -> of the elements that the golden moves with it, where all inputs are small, the share that stays.

    One run of the candidate and one of the golden for every floating input, and one of each more.
    """
    small = changed(examination.material, lambda t: t * _SMALL)
    found = {}
    before = _made(examination, small)
    for name, _ in _inputs(examination):
        if spent() or before is None:
            break
        after = _made(examination, small.with_inputs({name: nudge(small.inputs[name])}))
        shares = [] if after is None else list(_shares(before, after))
        if shares:
            found[name] = max(shares)
    return {name: share for name, share in found.items() if share > _HALF}


def reordered(tensor: Tensor) -> Tensor:
    """All numbers but the first and the last moved on by one place."""
    flat = tensor.detach().flatten().clone()
    if len(flat) > 3:
        flat[1:-1] = flat[1:-1].roll(1)
    return flat.view(tensor.shape)


def _inputs(examination: Examination) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in examination.material.inputs.items() if t.is_floating_point() and t.numel() > 3][:_MOST]


def _kept(examination: Examination, other: Mapping[str, Tensor]) -> str | None:
    moved = examination.material.with_inputs(dict(other))
    try:
        ref = examination.references(moved, examination.first, own_decisions(examination, examination.first))
        for again in (_written_over, _of_the_same_id):
            said = _stays(examination, ref, moved, tuple(other), again)
            if said is not None:
                return said
    except Exception:  # noqa: BLE001 - a wrong kernel may raise whatever it likes, and then says nothing here
        return None
    return None


Again = Callable[[Arena, str, Tensor], bool]


def _written_over(arena: Arena, name: str, other: Tensor) -> bool:
    """Other numbers in the same tensor."""
    buffer = arena.inputs[name]
    buffer.tensor.copy_(other)
    buffer.before = buffer.raw.clone()
    return True


def _of_the_same_id(arena: Arena, name: str, other: Tensor) -> bool:
    """Another tensor with the id of one that is gone; False where something holds that one, or the id is not given."""
    before = arena.inputs[name]
    now = arena.place(name, other)
    wanted, tried = id(before.tensor), []
    before.tensor = before.tensor.detach()  # for its bands; the one that the candidate was given is gone
    for _ in range(_TRIES):
        tried.append(now.detach())
        if id(tried[-1]) == wanted:
            arena.inputs[name].tensor = tried[-1]
            return True
    return False


def _stays(
    examination: Examination, ref: GoldenResults, moved: Material, names: tuple[str, ...], again: Again
) -> str | None:
    dense = {n: examination.material.inputs[n].clone(memory_format=torch.contiguous_format) for n in names}
    arena = Arena(ZERO_FILL)
    first = _forward(examination, examination.material.with_inputs(dense), arena)
    if not all(again(arena, n, moved.inputs[n]) for n in names):
        return None
    second = _forward(examination, moved, arena)
    for result, got in second.items():
        if result not in first or not _same(got, first[result]) or not _moves(examination, ref, result):
            continue
        how = "in the same memory" if again is _written_over else "in a tensor of the same id"
        said = f"other numbers of {' and '.join(names)} {how} give {result} as before, bit for bit"
        if _right(examination, result, first[result]):
            return said
        fresh = _forward(examination, moved, Arena(ZERO_FILL)).get(result)
        if fresh is not None and not _same(got, fresh):
            return f"{said}, and in a tensor of its own they do not"
    return None


def _forward(examination: Examination, material: Material, arena: Arena) -> dict[str, Tensor]:
    """What the forward returns of the inputs that lie in an arena, or are placed there, between guard bands as ever."""
    done = examination.execute(
        PROBE, PROBE, RunSettings(fresh=False, backward=False, arena=arena), material, look=False
    )
    return {n: t for n, t in done.outputs.items() if done.error is None}


def _moves(examination: Examination, ref: GoldenResults, name: str) -> bool:
    now, before = ref.bounded.get(name), examination.ref.bounded.get(name)
    if now is None or before is None or now.value.shape != before.value.shape:
        return False
    step = (now.value.double() - before.value.double()).abs()
    return bool((step > 4 * SLACK * (now.bound + before.bound)).any())


def _right(examination: Examination, name: str, got: Tensor) -> bool:
    bounded = examination.ref.bounded[name]
    error = (got.double() - bounded.value.double()).abs()
    return got.shape == bounded.value.shape and bool((error <= SLACK * bounded.bound).all())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def _made(examination: Examination, material: Material) -> tuple[dict[str, Tensor], GoldenResults] | None:
    done = examination.execute(PROBE, "small", RunSettings(), material, look=False)
    if done.error is not None:
        return None
    try:
        ref = examination.references(material, done, own_decisions(examination, done))
        _ = ref.bounded
    except GoldenError:
        return None
    return {n: t for n, _, t in done.results() if t is not None}, ref


def _shares(
    before: tuple[dict[str, Tensor], GoldenResults], after: tuple[dict[str, Tensor], GoldenResults]
) -> Iterator[float]:
    for name, got in after[0].items():
        old, now, then = before[0].get(name), after[1].bounded.get(name), before[1].bounded.get(name)
        if old is None or now is None or then is None or not old.shape == got.shape == now.value.shape:
            continue
        step = (now.value.double() - then.value.double()).abs()
        moves = step > SLACK * (now.bound + then.bound)
        if bool(moves.any()):
            yield float((got == old)[moves].double().mean())
