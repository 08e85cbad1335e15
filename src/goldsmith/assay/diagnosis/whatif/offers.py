"""All changes that can be tried on a golden, collected from the modules of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..edits import arithmetic as arithmetic_edits
from ..edits import epsilons as epsilons_edits
from ..edits import indices, integers, masks, readers, saved, scans, softmax
from ..edits import inputs as input_edits
from ..edits import reductions as reduction_edits
from ..edits.golden_edit import NamedEdit
from ..experiments.isolate import named
from ..graph.graph import Graph
from ..graph.node import Node
from . import call_groups, edited
from .backward import (
    addend_factors,
    addend_weights,
    block_sums,
    min_max_choices,
    rank_sums,
    recomputation,
    regrouped_sums,
    slopes,
    softmax_inner_products,
    transposed_reads,
)
from .change import Change
from .indexing import (
    memory_layouts,
    offset_arithmetic,
    pieces,
    positions,
    repeated_rows,
    segment_offsets,
    topk_weights,
    uncovered_rows,
)
from .inputs import (
    composed_slices,
    scalars,
    sequence_boundaries,
    swapped_results,
)
from .loops import (
    chunk_borders,
    gradient_carries,
    loop_bounds,
    marginals,
    recursion_starts,
    restarts,
    turn_offsets,
)
from .masks import padded_ends, padding
from .operators import (
    convolutions,
    interpolation,
    outer_products,
    partial_terms,
    pooling,
    single_readers,
    unfold,
)
from .search_context import SearchContext
from .sums import (
    gradient_addends,
    one_hot_sums,
    reduction_axes,
    sorted_products,
    surviving_addends,
)


def _edited(edits: Callable[..., Iterable[NamedEdit]], *arguments: object) -> Iterable[Change]:
    return edited.changes(edits(*arguments))


def _of_backward(edits: Callable[..., Iterable[NamedEdit]], nodes: list[Node], *arguments: object) -> Iterable[Change]:
    return edited.of_backward(edits(*arguments), nodes)


_OF_A_CALL = (
    ("arithmetic", partial(_edited, arithmetic_edits.edits)),
    ("epsilons", partial(_edited, epsilons_edits.edits)),
    ("reductions", partial(_edited, reduction_edits.edits)),
    ("softmax", partial(_edited, softmax.edits)),
    ("scans", partial(_edited, scans.edits)),
    ("indices", partial(_edited, indices.edits)),
    ("integer signs", partial(_edited, indices.integer_signs)),
    ("masks", partial(_edited, masks.edits)),
    ("convolutions", convolutions.changes),
    ("unfold", unfold.changes),
    ("topk weights", topk_weights.changes),
    ("pooling", pooling.changes),
    ("positions", positions.changes),
    ("outer products", outer_products.changes),
    ("offset arithmetic", offset_arithmetic.changes),
    ("laid_out", memory_layouts.changes),
    ("interpolation", interpolation.changes),
)
_ONE_TURN = 0.25  # subtracted from the prior of a mistake in a single iteration of a loop, because it is rarer


def of(search: SearchContext, calls: list[Node]) -> list[Change]:
    """All changes, unordered; a kind that raises an error on this golden is noted in `search.left_out`."""
    offered = partial(_offered, search)
    material = search.examination.material
    numbers = {**material.sizes, **material.scalars}
    narrowable = frozenset(n for n, t in material.inputs.items() if t.dtype == torch.float32)
    waiting = offered("inputs", partial(_edited, input_edits.edits), search.leaves, narrowable)
    waiting += offered("integers", partial(_edited, integers.edits), search.leaves, numbers)
    waiting += offered("sequence boundaries", sequence_boundaries.changes, search.leaves, search.tensor)
    waiting += offered("repeated rows", repeated_rows.changes, calls, search.behind)
    theirs = {n: t for n, (_, t) in named(search.own).items()}
    waiting += offered("swapped results", swapped_results.changes, search.examination.ref.values, theirs, search.tensor)
    waiting += offered("scalars", scalars.changes, search.examination.material.scalars, search.leaves)
    waiting += offered("composed slices", composed_slices.changes, search.leaves, search.tensor, numbers)
    waiting += offered("recursion starts", recursion_starts.changes, search.leaves, numbers)
    waiting += offered("invalid indices", partial(_edited, masks.unchecked_indices), calls, search.behind)
    waiting += offered("positions", positions.steps, calls, search.behind, numbers)
    waiting += offered("normalisation", partial(_edited, softmax.by_parts), calls, search.behind, numbers)
    waiting += offered("uncovered rows", uncovered_rows.changes, calls, search.behind, numbers)
    waiting += offered("pieces", pieces.changes, calls, search.behind)
    waiting += offered("readers", partial(_edited, readers.edits), Graph(calls, search.behind), _known(search))
    graph = Graph(calls, search.behind)
    saved_edits = partial(_of_backward, saved.edits, calls)
    waiting += offered("saved tensors", saved_edits, graph, search.examination.target.saved, search.leaves)
    waiting += offered("slopes", slopes.changes, calls)
    waiting += offered("sorted products", sorted_products.changes, calls)
    waiting += [c for c in offered("padding", padding.changes, calls) if c.at in search.behind]
    waiting += offered("padded ends", padded_ends.changes, search, calls)
    waiting += offered("single readers", single_readers.changes, calls, search.behind)
    waiting += offered("turn offsets", turn_offsets.changes, calls, search.behind)
    waiting += offered("segment offsets", segment_offsets.changes, calls, search.behind)
    waiting += offered("partial terms", partial_terms.changes, calls, search.behind)
    waiting += offered("remainders", partial(_edited, scans.remainders), calls, search.behind)
    waiting += offered("masked terms", partial(_edited, masks.hidden_terms), calls, search.behind)
    waiting += offered("loop bounds", loop_bounds.changes, calls, search.behind)
    waiting += offered("addend factors", addend_factors.changes, calls, search.behind)
    waiting += offered("reduction axes", reduction_axes.in_addends, calls, search.behind)
    turning = call_groups.turning([call for call in calls if call.index in search.behind])
    by_call: dict[int, list[Change]] = {}
    for call in calls:
        if call.index not in search.behind:
            continue
        own_changes = [c for kind, source in _OF_A_CALL for c in offered(kind, source, call, calls)]
        own_changes = [c for c in own_changes if search.allows(c)]
        often = offered("repeated", partial(_edited, reduction_edits.repeated), call)
        waiting += (
            [replace(c, prior=c.prior - _ONE_TURN) for c in own_changes] if call.index in turning else own_changes
        )
        if own_changes or often:
            by_call[call.index] = [*own_changes, *often]
    waiting += offered("call groups", call_groups.grouped, calls, by_call)
    waiting += offered("recomputation", recomputation.changes, calls, by_call, search.tensor)
    waiting += _drawn(offered("chunk borders", chunk_borders.changes, calls, by_call, search.judge.wrong_at))
    waiting += _drawn(offered("surviving addends", surviving_addends.changes, calls, search.judge))
    waiting += _drawn(offered("one hot sums", one_hot_sums.changes, calls, search.judge))
    waiting += _drawn(
        offered("gradient addends", gradient_addends.changes, calls, search.behind, search.judge, search.leaves)
    )
    if search.tensor.endswith(".grad"):
        waiting += _in_backward(search, calls, by_call)
    return waiting


def _in_backward(search: SearchContext, calls: list[Node], by_call: Mapping[int, list[Change]]) -> list[Change]:
    """Changes for mistakes that only hand-written backwards make."""
    offered = partial(_offered, search)
    material = search.examination.material
    numbers = {**material.sizes, **material.scalars}
    waiting = offered("marginals", marginals.changes, calls, search.behind)
    waiting += offered("min max choices", min_max_choices.changes, calls, search.behind)
    waiting += offered("regrouped sums", regrouped_sums.changes, calls, search.behind)
    waiting += offered("gradient carries", gradient_carries.changes, calls, search.behind, search.leaves)
    waiting += offered("restarts", restarts.changes, calls, search.behind)
    waiting += offered("rank sums", rank_sums.changes, calls, search.behind, numbers)
    waiting += offered("block sums", block_sums.changes, calls, search.behind)
    waiting += offered("transposed reads", transposed_reads.changes, calls, search.behind, numbers)
    waiting += _drawn(offered("addend weights", addend_weights.changes, calls, search.behind, search.judge))
    alone = [c for index in by_call if calls[index].backward for c in by_call[index]]
    return waiting + _drawn(
        offered("softmax inner products", softmax_inner_products.changes, calls, search.behind, [*waiting, *alone])
    )


def _drawn(changes: list[Change]) -> list[Change]:
    """Marks changes that were derived from the candidate's numbers, or from other such changes."""
    return [replace(change, drawn=True) for change in changes]


def _known(search: SearchContext) -> dict[str, Tensor]:
    """Inputs and stages of the forward, by name."""
    values = search.examination.ref.values
    names = [n for n in search.examination.ref.order if not n.endswith(".grad") and n != search.tensor]
    stages = {n: values[n].double() for n in names if n in values and values[n].is_floating_point()}
    return {**{n: t for n, t in search.leaves.items() if not n.startswith("grad_")}, **stages}


def _offered(
    search: SearchContext, kind: str, source: Callable[..., Iterable[Change]], *arguments: object
) -> list[Change]:
    """The changes of one kind; none if it raises an error, which is noted in `search.left_out`."""
    try:
        return list(source(*arguments))
    except Exception as error:  # noqa: BLE001 - goldens have every form, and each kind reads one that it knows
        search.left_out[kind] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return []
