"""All changes that can be tried on a golden: tables of their kinds, each with the arguments that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..edits import arithmetic, epsilons, indices, integers, masks, offsets, readers, saved, scalars, softmax, unfold
from ..edits import inputs as input_edits
from ..edits import reductions as reduction_edits
from ..edits.golden_edit import NamedEdit
from ..edits.gradients import factors
from ..edits.gradients import indices as gradient_indices
from ..graph.graph import Graph
from ..graph.loops import turning
from . import call_groups, composed_slices, lost_addends, recomputation, single_readers
from .changed_golden import ChangedGolden

Source = Callable[..., Iterable[NamedEdit]]
# (kind, its edits, the arguments by name)
_KINDS: tuple[tuple[str, Source, str], ...] = (
    ("inputs", input_edits.edits, "inputs narrowable"),
    ("integers", integers.edits, "inputs numbers"),
    ("scalars", scalars.edits, "scalars inputs"),
    ("composed slices", composed_slices.changes, "inputs tensor numbers"),
    ("invalid indices", masks.unchecked_indices, "nodes behind"),
    ("readers", readers.edits, "graph stages"),
    ("saved tensors", saved.edits, "graph"),
    ("single readers", single_readers.changes, "nodes behind"),
    ("factors", factors.edits, "graph"),
)
_OF_A_NODE: tuple[tuple[str, Source], ...] = (
    ("arithmetic", arithmetic.edits),
    ("epsilons", epsilons.edits),
    ("reductions", reduction_edits.edits),
    ("softmax", softmax.edits),
    ("indices", indices.edits),
    ("integer signs", indices.integer_signs),
    ("masks", masks.edits),
    ("unfold", unfold.edits),
    ("offsets", offsets.edits),
)
_ONE_TURN = 0.25  # subtracted from the prior of a mistake in a single iteration of a loop, because it is rarer


def of(search: ChangedGolden) -> list[NamedEdit]:
    """All changes, unordered; a kind that raises an error on this golden is noted in `search.left_out`."""
    nodes, offered, known = search.nodes, partial(_offered, search), _arguments(search)
    waiting = [c for kind, edits, names in _KINDS for c in offered(kind, edits, *(known[n] for n in names.split()))]
    behind = [node for node in nodes if node.index in search.behind]
    in_loops = turning(behind)
    by_node: dict[int, list[NamedEdit]] = {}
    for node in behind:
        own = [c for kind, edits in _OF_A_NODE for c in offered(kind, edits, node, nodes) if search.allows(c)]
        often = offered("repeated", reduction_edits.repeated, node)
        waiting += [replace(c, prior=c.prior - _ONE_TURN) for c in own] if node.index in in_loops else own
        if own or often:
            by_node[node.index] = [*own, *often]
    waiting += offered("call groups", call_groups.grouped, nodes, by_node)
    waiting += offered("recomputation", recomputation.changes, nodes, by_node, search.tensor)
    waiting += offered("lost addends", lost_addends.changes, nodes, search.behind, search.judge)
    if search.tensor.endswith(".grad"):
        waiting += offered("gradient indices", gradient_indices.edits, known["graph"], known["numbers"])
    return waiting


def _arguments(search: ChangedGolden) -> Mapping[str, Any]:
    """The arguments of the tables, by name."""
    examination = search.examination
    material, ref = examination.material, examination.ref
    forward = [n for n in ref.order if not n.endswith(".grad") and n != search.tensor]
    stages = {n: ref.values[n].double() for n in forward if n in ref.values and ref.values[n].is_floating_point()}
    return {
        "nodes": search.nodes, "behind": search.behind, "graph": Graph(search.nodes, search.behind),
        "inputs": search.leaves, "tensor": search.tensor, "scalars": material.scalars,
        "numbers": {**material.sizes, **material.scalars},
        "narrowable": frozenset(n for n, t in material.inputs.items() if t.dtype == torch.float32),
        "stages": {**{n: t for n, t in search.leaves.items() if not n.startswith("grad_")}, **stages},
    }  # fmt: skip


def _offered(search: ChangedGolden, kind: str, edits: Source, *arguments: object) -> list[NamedEdit]:
    """The changes of one kind; none if it raises an error, which is noted in `search.left_out`."""
    try:
        return [replace(edit, kind=kind) for edit in edits(*arguments)]
    except Exception as error:  # noqa: BLE001 - goldens have every form, and each kind reads one that it knows
        search.left_out[kind] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return []
