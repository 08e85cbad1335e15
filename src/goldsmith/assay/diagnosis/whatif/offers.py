"""All changes that can be tried on a golden, collected from the modules of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..graph.node import Node
from ..isolate import named
from . import call_groups
from .backward import (
    addend_factors,
    addend_weights,
    block_sums,
    cross_products,
    min_max_choices,
    rank_sums,
    recomputation,
    regrouped_sums,
    row_offsets,
    saved_tensors,
    slopes,
    softmax_inner_products,
    transposed_reads,
    unnormalised_weights,
)
from .change import Change
from .indexing import (
    axis_splits,
    grouped_heads,
    indices,
    lookups,
    memory_layouts,
    neighbours,
    offset_arithmetic,
    pair_tables,
    pieces,
    positions,
    repeated_rows,
    segment_offsets,
    topk_weights,
    uncovered_rows,
)
from .inputs import (
    block_offsets,
    component_orders,
    composed_slices,
    integer_signs,
    integers,
    leaves,
    partitions,
    scalars,
    sequence_boundaries,
    swapped_results,
)
from .loops import (
    chunk_borders,
    gradient_carries,
    in_place_updates,
    loop_bounds,
    marginals,
    recursion_starts,
    restarts,
    stale_reads,
    turn_offsets,
)
from .masks import diagonal_masks, infinities, invalid_indices, masked_terms, masked_values, padded_ends, padding
from .operators import (
    convolutions,
    divisors,
    elementwise,
    epsilons,
    factor_placement,
    factor_scopes,
    functions,
    interpolation,
    operands,
    outer_products,
    partial_terms,
    pooling,
    single_readers,
    unfold,
)
from .search_context import SearchContext
from .sums import (
    block_means,
    gradient_addends,
    normalisation,
    one_hot_sums,
    online_softmax,
    prefix_sums,
    reduction_axes,
    reductions,
    remainders,
    sorted_products,
    split_sums,
    surviving_addends,
    triangular_sums,
)

_OF_A_CALL = (
    ("elementwise", elementwise.changes),
    ("epsilons", epsilons.changes),
    ("reductions", reductions.changes),
    ("online softmax", online_softmax.changes),
    ("block means", block_means.changes),
    ("prefix sums", prefix_sums.changes),
    ("functions", functions.changes),
    ("convolutions", convolutions.changes),
    ("unfold", unfold.changes),
    ("integer signs", integer_signs.changes),
    ("indices", indices.changes),
    ("lookups", lookups.changes),
    ("diagonal masks", diagonal_masks.changes),
    ("topk weights", topk_weights.changes),
    ("row offsets", row_offsets.of_a_call),
    ("masked values", masked_values.changes),
    ("axis splits", axis_splits.changes),
    ("factor placement", factor_placement.changes),
    ("grouped heads", grouped_heads.changes),
    ("pooling", pooling.changes),
    ("triangular sums", triangular_sums.changes),
    ("positions", positions.changes),
    ("outer products", outer_products.changes),
    ("normalisation", normalisation.changes),
    ("offset arithmetic", offset_arithmetic.changes),
    ("neighbours", neighbours.changes),
    ("infinities", infinities.changes),
    ("laid_out", memory_layouts.changes),
    ("divisors", divisors.changes),
    ("pair tables", pair_tables.changes),
    ("split sums", split_sums.changes),
    ("cross products", cross_products.changes),
    ("interpolation", interpolation.changes),
)
_ONE_TURN = 0.25  # subtracted from the prior of a mistake in a single iteration of a loop, because it is rarer


def of(search: SearchContext, calls: list[Node]) -> list[Change]:
    """All changes, unordered; a kind that raises an error on this golden is noted in `search.left_out`."""
    offered = partial(_offered, search)
    waiting = offered("leaves", leaves.changes, search.examination, search.leaves)
    waiting += offered("block offsets", block_offsets.changes, search.leaves)
    waiting += offered("partitions", partitions.changes, search.leaves)
    waiting += offered("sequence boundaries", sequence_boundaries.changes, search.leaves, search.tensor)
    waiting += offered("component orders", component_orders.changes, search.leaves)
    waiting += offered("repeated rows", repeated_rows.changes, calls, search.behind)
    theirs = {n: t for n, (_, t) in named(search.own).items()}
    waiting += offered("swapped results", swapped_results.changes, search.examination.ref.values, theirs, search.tensor)
    waiting += offered("scalars", scalars.changes, search.examination.material.scalars, search.leaves)
    material = search.examination.material
    numbers = {**material.sizes, **material.scalars}
    waiting += offered("composed slices", composed_slices.changes, search.leaves, search.tensor, numbers)
    waiting += offered("integers", integers.changes, search.leaves, numbers)
    waiting += offered("recursion starts", recursion_starts.changes, search.leaves, numbers)
    waiting += offered("invalid indices", invalid_indices.changes, calls, search.behind)
    waiting += offered("positions", positions.steps, calls, search.behind, numbers)
    waiting += offered("normalisation", normalisation.by_parts, calls, search.behind, numbers)
    waiting += offered("uncovered rows", uncovered_rows.changes, calls, search.behind, numbers)
    waiting += offered("pieces", pieces.changes, calls, search.behind)
    waiting += offered("operands", operands.changes, calls, search.behind, _known(search))
    waiting += offered("saved tensors", saved_tensors.changes, calls, search.examination.target.saved)
    waiting += offered("slopes", slopes.changes, calls)
    waiting += offered("sorted products", sorted_products.changes, calls)
    waiting += [c for c in offered("padding", padding.changes, calls) if c.at in search.behind]
    waiting += offered("padded ends", padded_ends.changes, search, calls)
    waiting += offered("single readers", single_readers.changes, calls, search.behind)
    waiting += offered("turn offsets", turn_offsets.changes, calls, search.behind)
    waiting += offered("segment offsets", segment_offsets.changes, calls, search.behind, search.leaves)
    waiting += offered("factor scopes", factor_scopes.changes, calls, search.behind)
    waiting += offered("partial terms", partial_terms.changes, calls, search.behind)
    waiting += offered("remainders", remainders.changes, calls, search.behind)
    waiting += offered("stale reads", stale_reads.changes, calls, search.behind)
    waiting += offered("masked terms", masked_terms.changes, calls, search.behind)
    waiting += offered("loop bounds", loop_bounds.changes, calls, search.behind)
    waiting += offered("in place updates", in_place_updates.changes, calls, search.behind)
    waiting += offered("addend factors", addend_factors.changes, calls, search.behind)
    waiting += offered("reduction axes", reduction_axes.in_addends, calls, search.behind)
    turning = call_groups.turning([call for call in calls if call.index in search.behind])
    by_call: dict[int, list[Change]] = {}
    for call in calls:
        if call.index not in search.behind:
            continue
        own_changes = [c for kind, source in _OF_A_CALL for c in offered(kind, source, call, calls)]
        own_changes = [c for c in own_changes if search.allows(c)]
        often = offered("repeated", reductions.repeated, call)
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
    waiting = offered("row offsets", row_offsets.changes, calls, search.behind)
    waiting += offered("marginals", marginals.changes, calls, search.behind)
    waiting += offered("unnormalised weights", unnormalised_weights.changes, calls, search.behind)
    waiting += offered("min max choices", min_max_choices.changes, calls, search.behind)
    waiting += offered("partitions", partitions.in_backward, calls, search.behind, search.leaves)
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
