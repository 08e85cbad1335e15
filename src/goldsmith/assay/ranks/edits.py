"""Edits of the golden that reproduce known faults of sharded computations.

An edit says what every rank would return if the fault were there: it calls the golden on changed inputs, such as the
rank's own shard, and changes the results, such as dividing by the number of ranks. `explain.py` compares these numbers
with those of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Coordinates, coordinates, is_sharded, kept, ranges
from .plain_step import PlainStep, Values

Results = dict[str, Tensor]


@dataclass(frozen=True)
class RankEdit:
    """A possible fault: its cause, its description with {name} for the tensor, and the results on the rank `at`.

    whole   the results on a rank have the shapes of the whole results; otherwise those of a smaller problem, so that
            only results that are not sharded can be compared
    alike   all ranks return the same
    """

    cause: str
    text: str
    on: Callable[[Values, Coordinates], Results]
    whole: bool = True
    alike: bool = False


def edits(step: PlainStep) -> Iterator[RankEdit]:
    """All edits that make sense for these inputs and placements, the simpler ones first."""
    yield from _scaled(step)
    yield from _own_shards(step)
    yield from _means(step)
    yield from _other_data(step)
    yield from _counted_again(step)
    yield from _whole_for_shard(step)
    yield from _sentinels(step)


def _factors(step: PlainStep) -> list[tuple[int, str]]:
    """(size, its name): all ranks, and each dimension of the mesh."""
    names = list(step.target.mesh or {"ranks": -1})
    world = math.prod(step.sizes)
    factors = [(world, f"{world}, the number of ranks")]
    if len(step.sizes) > 1:
        factors += [(size, f"{size}, the size of {name}") for name, size in zip(names, step.sizes, strict=True)]
    return [(size, text) for size, text in factors if size > 1]


def _scaled(step: PlainStep) -> Iterator[RankEdit]:
    for size, text in _factors(step):
        yield RankEdit("double_count", f"{{name}} is the golden's times {text}", _times(step, size), alike=True)
        yield RankEdit(
            "average_for_sum", f"{{name}} is the golden's divided by {text}", _times(step, 1 / size), alike=True
        )


def _times(step: PlainStep, factor: float) -> Callable[[Values, Coordinates], Results]:
    def on(values: Values, at: Coordinates) -> Results:
        return {n: t * factor if t.is_floating_point() else t for n, t in step(values).items()}

    return on


def _own_shards(step: PlainStep) -> Iterator[RankEdit]:
    """Every rank has what its own shards give; over a dimension of the mesh, what the shards of its group give."""
    dimensions = [tuple(range(len(step.sizes)))]
    if len(step.sizes) > 1:
        dimensions += [(d,) for d in range(len(step.sizes))]
    names = list(step.target.mesh or {"ranks": -1})
    for dims in dimensions:
        over = "" if len(dims) == len(step.sizes) else f" over {', '.join(names[d] for d in dims)}"
        factors = [(1.0, "")]
        factors += [(1 / size, f", divided by {text}") for size, text in _factors(step)]
        factors += [(float(size), f", times {text}") for size, text in _factors(step)]
        for subset in _groups(step):
            shards = _listed(subset)
            for factor, words in factors:
                text = f"on every rank, {{name}} is what the rank's own shard of {shards} gives{words}"
                text += f": nothing sums it{over or ' over the ranks'}"
                yield RankEdit("missing_reduction", text, _masked(step, subset, dims, factor))
                yield RankEdit("missing_reduction", text, _cut(step, subset, dims, factor), whole=False)


def _groups(step: PlainStep) -> list[tuple[str, ...]]:
    """Groups of sharded inputs: all, those with a sharded axis of one size, and each alone."""
    sharded = [n for n in _tensors(step) if is_sharded(step.placed(n))]
    by_size: dict[int, list[str]] = {}
    for name in sharded:
        tensor = step.values[name]
        for axis in ranges(tensor.shape, step.placed(name), (0,) * len(step.sizes), step.sizes):
            by_size.setdefault(tensor.shape[axis], []).append(name)
    groups = [tuple(sharded), *map(tuple, by_size.values()), *((name,) for name in sharded)]
    return [g for g in dict.fromkeys(groups) if g]


def _tensors(step: PlainStep) -> list[str]:
    return [n for n, v in step.values.items() if isinstance(v, Tensor) and v.dim()]


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _group_of(step: PlainStep, at: Coordinates, dims: tuple[int, ...]) -> list[Coordinates]:
    return [q for q in coordinates(step.sizes) if all(q[d] == at[d] for d in dims)]


def _masked(
    step: PlainStep, subset: tuple[str, ...], dims: tuple[int, ...], factor: float
) -> Callable[[Values, Coordinates], Results]:
    def on(values: Values, at: Coordinates) -> Results:
        changed = dict(values)
        for name in subset:
            t = values[name]
            if t.is_floating_point():
                for axis, indices in kept(t.shape, step.placed(name), _group_of(step, at, dims), step.sizes).items():
                    own = set(indices.tolist())
                    mask = torch.tensor([float(i in own) for i in range(t.shape[axis])], dtype=t.dtype, device=t.device)
                    t = t * mask.reshape(-1, *(1,) * (t.dim() - 1 - axis))
            changed[name] = t
        return {n: t * factor if t.is_floating_point() else t for n, t in step(changed).items()}

    return on


def _shortened(step: PlainStep, values: Values, subset: tuple[str, ...], ranks: list[Coordinates]) -> Values:
    changed = dict(values)
    for name in subset:
        t = values[name]
        for axis, indices in kept(t.shape, step.placed(name), ranks, step.sizes).items():
            t = t.index_select(axis, indices.to(t.device))
        changed[name] = t
    return changed


def _cut(
    step: PlainStep, subset: tuple[str, ...], dims: tuple[int, ...], factor: float
) -> Callable[[Values, Coordinates], Results]:
    def on(values: Values, at: Coordinates) -> Results:
        results = step(_shortened(step, values, subset, _group_of(step, at, dims)))
        return {n: t * factor if t.is_floating_point() else t for n, t in results.items()}

    return on


def _means(step: PlainStep) -> Iterator[RankEdit]:
    """The mean or the sum over ranks of what each gets from its own shards as if they were everything."""
    places = coordinates(step.sizes)
    for subset in _groups(step):

        def added(values: Values, subset: tuple[str, ...] = subset) -> Results:
            total: Results = {}
            for at in places:
                for name, t in step(_shortened(step, values, subset, [at])).items():
                    total[name] = t if name not in total or total[name].shape != t.shape else total[name] + t
            return total

        def mean(values: Values, at: Coordinates, added: Callable[[Values], Results] = added) -> Results:
            return {n: t / len(places) if t.is_floating_point() else t for n, t in added(values).items()}

        def total(values: Values, at: Coordinates, added: Callable[[Values], Results] = added) -> Results:
            return added(values)

        shards = _listed(subset)
        text = f"{{name}} is the mean over ranks of what each computes from its own shard of {shards} alone"
        yield RankEdit("average_for_sum", text, mean, whole=False, alike=True)
        text = f"{{name}} is the sum over ranks of what each computes from its own shard of {shards} alone"
        yield RankEdit("double_count", text, total, whole=False, alike=True)


def _other_data(step: PlainStep) -> Iterator[RankEdit]:
    """Shards that are copies of the first rank's, or in another order; replicas of which only the first rows count."""
    world = math.prod(step.sizes)
    for subset in _groups(step):
        shards = _listed(subset)
        for turn, text in [
            (None, f"{{name}} is what comes if every rank has the first rank's shard of {shards}"),
            *((t, f"{{name}} is what comes if rank i has the shard of {shards} that rank i + {t} should have")
              for t in range(1, world)),
        ]:  # fmt: skip

            def on(
                values: Values, at: Coordinates, subset: tuple[str, ...] = subset, turn: int | None = turn
            ) -> Results:
                return step(_moved(step, values, subset, turn))

            yield RankEdit("own_bias", text, on, alike=True)
    rows: dict[int, list[str]] = {}
    for name in _tensors(step):
        if not is_sharded(step.placed(name)):
            rows.setdefault(step.values[name].shape[0], []).append(name)
    for size, names in rows.items():
        if size % world or size == world or len(names) < 2:
            continue
        for first, text in [
            (slice(0, size // world), f"the first {size // world} of {size} rows"),
            (slice(0, size, world), f"every {world}th row"),
        ]:

            def biased(values: Values, at: Coordinates, names: list[str] = names, first: slice = first) -> Results:
                return step({**values, **{n: values[n][first] for n in names}})

            words = f"{{name}} is what comes if every rank sees only {text} of {_listed(tuple(names))}"
            yield RankEdit("own_bias", words, biased, whole=False, alike=True)


def _moved(step: PlainStep, values: Values, subset: tuple[str, ...], turn: int | None) -> Values:
    changed = dict(values)
    places = coordinates(step.sizes)
    for name in subset:
        t = values[name]
        for axis in kept(t.shape, step.placed(name), places, step.sizes):
            spans = [ranges(t.shape, step.placed(name), at, step.sizes)[axis] for at in places]
            unique = list(dict.fromkeys(spans))
            parts = []
            for k, (lo, hi) in enumerate(unique):
                source = unique[0 if turn is None else (k + turn) % len(unique)]
                piece = t.narrow(axis, source[0], source[1] - source[0])
                if turn is None and hi - lo < piece.shape[axis]:
                    piece = piece.narrow(axis, 0, hi - lo)
                parts.append(piece)
            moved = torch.cat(parts, axis)
            t = moved if moved.shape == t.shape else t
        changed[name] = t
    return changed


def _counted_again(step: PlainStep) -> Iterator[RankEdit]:
    """An input that every rank has counts once for each of them: in a sum, or in a sum of squares."""
    for name in _tensors(step):
        if not step.values[name].is_floating_point() or name.startswith("grad_"):
            continue
        for size, text in _factors(step):
            for factor, how in ((float(size), ""), (math.sqrt(size), " in a sum of squares")):

                def on(values: Values, at: Coordinates, name: str = name, factor: float = factor) -> Results:
                    return step({**values, name: values[name] * factor})

                words = f"{{name}} is what comes if {name} counts {text.partition(',')[0]} times{how}"
                yield RankEdit("double_count", words, on, alike=True)


def _whole_for_shard(step: PlainStep) -> Iterator[RankEdit]:
    """Every rank has all of a sharded input, and a sum over ranks takes it for a shard."""
    for subset in _groups(step):

        def on(values: Values, at: Coordinates, subset: tuple[str, ...] = subset) -> Results:
            changed = dict(values)
            for name in subset:
                for d, placement in enumerate(step.placed(name)):
                    if placement.is_shard():
                        changed[name] = torch.cat([changed[name]] * step.sizes[d], placement.dim)
            return step(changed)

        words = (
            f"{{name}} is what comes if every rank has all of {_listed(subset)}, and each counts it as its own shard"
        )
        yield RankEdit("double_count", words, on, whole=False, alike=True)


def _sentinels(step: PlainStep) -> Iterator[RankEdit]:
    """Ids of other ranks' experts that count as some expert of this rank."""
    tables = [n for n in step.inputs if n in _tensors(step) and step.values[n].is_floating_point()]
    by_expert = [n for n in tables if any(p.is_shard() and p.dim == 0 for p in step.placed(n))]
    counts = {step.values[n].shape[0]: step.placed(n) for n in by_expert}
    for ids in _tensors(step):
        t = step.values[ids]
        if t.dtype not in (torch.int32, torch.int64) or not t.numel():
            continue
        for size, placed in counts.items():
            if int(t.max()) >= size:
                continue
            spans = [ranges((size,), placed, at, step.sizes).get(0, (0, size)) for at in coordinates(step.sizes)]
            for how, change in _LEAKS.items():

                def on(
                    values: Values, at: Coordinates, ids: str = ids, spans: list[tuple[int, int]] = spans,
                    change: Callable[[Tensor, int, int], Tensor] = change,
                ) -> Results:  # fmt: skip
                    total: Results = {}
                    for lo, hi in dict.fromkeys(spans):
                        if hi > lo:
                            for n, r in step({**values, ids: change(values[ids], lo, hi)}).items():
                                total[n] = total[n] + r if n in total and r.is_floating_point() else r
                    return total

                words = f"{{name}} is what comes if each rank takes ids of other ranks' experts in {ids} for {how}"
                yield RankEdit("sentinel_leak", words, on, alike=True)


def _foreign(ids: Tensor, lo: int, hi: int) -> Tensor:
    return (ids < lo) | (ids >= hi)


_LEAKS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "its last expert": lambda ids, lo, hi: torch.where(_foreign(ids, lo, hi), hi - 1, ids),
    "its first expert": lambda ids, lo, hi: torch.where(_foreign(ids, lo, hi), lo, ids),
    "the nearest of its own": lambda ids, lo, hi: ids.clamp(lo, hi - 1),
    "the remainder modulo its number of experts": lambda ids, lo, hi: lo + ids % (hi - lo),
}
