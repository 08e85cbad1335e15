"""Every change that a golden of this form allows, whichever kind it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..isolate import named
from . import (
    addends,
    again,
    apart,
    arrivals,
    before,
    beyond,
    blocks,
    borders,
    branches,
    carried,
    carries,
    chosen,
    chunks,
    components,
    composed,
    convolutions,
    counting,
    crossed,
    decided,
    diagonals,
    divisors,
    elementwise,
    elsewhere,
    ends,
    epsilons,
    exchanged,
    functions,
    groups,
    hidden,
    infinities,
    inner,
    inputs,
    laid_out,
    late,
    leaves,
    lookups,
    marginals,
    masks,
    misplaced,
    moments,
    moves,
    neighbours,
    normalised,
    online,
    onwards,
    operands,
    ordered,
    padded,
    padding,
    parted,
    partitions,
    pieces,
    products,
    readers,
    reckoned,
    regrouped,
    repeated_rows,
    restarts,
    rests,
    saved,
    scalars,
    scans,
    scattered,
    segments,
    shares,
    signs,
    slopes,
    spans,
    spread,
    starts,
    sums,
    survivors,
    tables,
    tiles,
    turned,
    turns,
    unfolded,
    unguarded,
    updated,
    weighed,
    whole_places,
    windows,
)
from .calls import Change, OperatorCall
from .search_context import SearchContext

_OF_A_CALL = (
    ("elementwise", elementwise.changes),
    ("epsilons", epsilons.changes),
    ("sums", sums.changes),
    ("online", online.changes),
    ("blocks", blocks.changes),
    ("scans", scans.changes),
    ("functions", functions.changes),
    ("convolutions", convolutions.changes),
    ("unfolded", unfolded.changes),
    ("signs", signs.changes),
    ("moves", moves.changes),
    ("lookups", lookups.changes),
    ("diagonals", diagonals.changes),
    ("chosen", chosen.changes),
    ("misplaced", misplaced.of_a_call),
    ("masks", masks.changes),
    ("tiles", tiles.changes),
    ("late", late.changes),
    ("spread", spread.changes),
    ("windows", windows.changes),
    ("carried", carried.changes),
    ("counting", counting.changes),
    ("products", products.changes),
    ("normalised", normalised.changes),
    ("reckoned", reckoned.changes),
    ("neighbours", neighbours.changes),
    ("infinities", infinities.changes),
    ("laid_out", laid_out.changes),
    ("divisors", divisors.changes),
    ("tables", tables.changes),
    ("apart", apart.changes),
    ("crossed", crossed.changes),
    ("whole places", whole_places.changes),
)
_ONE_TURN = 0.25  # rarer is a mistake in one turn of a loop alone


def of(search: SearchContext, calls: list[OperatorCall]) -> list[Change]:
    """All of them, in no order; a kind that stumbles over the golden's form is left out, and said."""
    offered = partial(_offered, search)
    waiting = offered("leaves", leaves.changes, search.examination, search.leaves)
    waiting += offered("elsewhere", elsewhere.changes, search.leaves)
    waiting += offered("partitions", partitions.changes, search.leaves)
    waiting += offered("onwards", onwards.changes, search.leaves, search.tensor)
    waiting += offered("components", components.changes, search.leaves)
    waiting += offered("repeated rows", repeated_rows.changes, calls, search.behind)
    theirs = {n: t for n, (_, t) in named(search.own).items()}
    waiting += offered("exchanged", exchanged.changes, search.examination.ref.values, theirs, search.tensor)
    waiting += offered("scalars", scalars.changes, search.examination.material.scalars, search.leaves)
    material = search.examination.material
    numbers = {**material.sizes, **material.scalars}
    waiting += offered("composed", composed.changes, search.leaves, search.tensor, numbers)
    waiting += offered("inputs", inputs.changes, search.leaves, numbers)
    waiting += offered("starts", starts.changes, search.leaves, numbers)
    waiting += offered("unguarded", unguarded.changes, calls, search.behind)
    waiting += offered("counting", counting.steps, calls, search.behind, numbers)
    waiting += offered("normalised", normalised.by_parts, calls, search.behind, numbers)
    waiting += offered("beyond", beyond.changes, calls, search.behind, numbers)
    waiting += offered("pieces", pieces.changes, calls, search.behind)
    waiting += offered("operands", operands.changes, calls, search.behind, _known(search))
    waiting += offered("saved", saved.changes, calls, search.examination.target.saved)
    waiting += offered("slopes", slopes.changes, calls)
    waiting += offered("ordered", ordered.changes, calls)
    waiting += [c for c in offered("padding", padding.changes, calls) if c.at in search.behind]
    waiting += offered("padded", padded.changes, search, calls)
    waiting += offered("readers", readers.changes, calls, search.behind)
    waiting += offered("turns", turns.changes, calls, search.behind)
    waiting += offered("segments", segments.changes, calls, search.behind, search.leaves)
    waiting += offered("parted", parted.changes, calls, search.behind)
    waiting += offered("branches", branches.changes, calls, search.behind)
    waiting += offered("rests", rests.changes, calls, search.behind)
    waiting += offered("before", before.changes, calls, search.behind)
    waiting += offered("hidden", hidden.changes, calls, search.behind)
    waiting += offered("ends", ends.changes, calls, search.behind)
    waiting += offered("updated", updated.changes, calls, search.behind)
    waiting += offered("addends", addends.changes, calls, search.behind)
    waiting += offered("spans", spans.in_addends, calls, search.behind)
    turning = groups.turning([call for call in calls if call.index in search.behind])
    by_call: dict[int, list[Change]] = {}
    for call in calls:
        if call.index not in search.behind:
            continue
        made = [c for kind, source in _OF_A_CALL for c in offered(kind, source, call, calls)]
        made = [c for c in made if search.asked(c)]
        often = offered("repeated", sums.repeated, call)
        waiting += [replace(c, prior=c.prior - _ONE_TURN) for c in made] if call.index in turning else made
        if made or often:
            by_call[call.index] = [*made, *often]
    waiting += offered("groups", groups.grouped, calls, by_call)
    waiting += offered("again", again.changes, calls, by_call, search.tensor)
    waiting += _drawn(offered("borders", borders.changes, calls, by_call, search.judge.wrong_at))
    waiting += _drawn(offered("survivors", survivors.changes, calls, search.judge))
    waiting += _drawn(offered("scattered", scattered.changes, calls, search.judge))
    waiting += _drawn(offered("arrivals", arrivals.changes, calls, search.behind, search.judge, search.leaves))
    if search.tensor.endswith(".grad"):
        waiting += _in_backward(search, calls, by_call)
    return waiting


def _in_backward(search: SearchContext, calls: list[OperatorCall], by_call: Mapping[int, list[Change]]) -> list[Change]:
    """What only kernels' hand-written backwards get wrong."""
    offered = partial(_offered, search)
    material = search.examination.material
    numbers = {**material.sizes, **material.scalars}
    waiting = offered("misplaced", misplaced.changes, calls, search.behind)
    waiting += offered("marginals", marginals.changes, calls, search.behind)
    waiting += offered("moments", moments.changes, calls, search.behind)
    waiting += offered("decided", decided.changes, calls, search.behind)
    waiting += offered("partitions", partitions.in_backward, calls, search.behind, search.leaves)
    waiting += offered("regrouped", regrouped.changes, calls, search.behind)
    waiting += offered("carries", carries.changes, calls, search.behind, search.leaves)
    waiting += offered("restarts", restarts.changes, calls, search.behind)
    waiting += offered("shares", shares.changes, calls, search.behind, numbers)
    waiting += offered("chunks", chunks.changes, calls, search.behind)
    waiting += offered("turned", turned.changes, calls, search.behind, numbers)
    waiting += _drawn(offered("weighed", weighed.changes, calls, search.behind, search.judge))
    alone = [c for index in by_call if calls[index].backward for c in by_call[index]]
    return waiting + _drawn(offered("inner", inner.changes, calls, search.behind, [*waiting, *alone]))


def _drawn(changes: list[Change]) -> list[Change]:
    """Made of the numbers that came, or of changes that are."""
    return [replace(change, drawn=True) for change in changes]


def _known(search: SearchContext) -> dict[str, Tensor]:
    """Inputs and stages of the forward by name."""
    values = search.examination.ref.values
    made = [n for n in search.examination.ref.order if not n.endswith(".grad") and n != search.tensor]
    stages = {n: values[n].double() for n in made if n in values and values[n].is_floating_point()}
    return {**{n: t for n, t in search.leaves.items() if not n.startswith("grad_")}, **stages}


def _offered(search: SearchContext, kind: str, source: Callable[..., Iterable[Change]], *given: Any) -> list[Change]:
    """The changes of one kind; what it stumbles over is left out and said, and the others are still tried."""
    try:
        return list(source(*given))
    except Exception as error:  # noqa: BLE001 - goldens have every form, and each kind reads one that it knows
        search.left_out[kind] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return []
