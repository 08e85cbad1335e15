"""Faults that offload.testing.inject plants. While there are none, `on` is False and the lanes call nothing here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..adapters import NO_ADAPTER, ActiveLora
from ..planning.call import UNWRITTEN, Call, Outcome
from ..store.expert_store import ExpertStore
from .recomputation import Hook, stages

PLACES = ("weights", "input", "routing", "gate_up", "activation", "product", "down", "transfer", "merge", "race")


@dataclass(eq=False)
class Fault:
    """A fault that is injected into the next `left` calls of `layer`.

    expert None: every expert. rows None: every token of a call; otherwise these rows, counted from the call's first row
    even if the call is split into pieces.
    """

    stage: str
    layer: int
    expert: int | None = None
    rows: tuple[int, ...] | None = None
    value: float = math.nan
    left: int = 1
    calls: set[int] = field(default_factory=set)  # numbers of the calls into which it was injected

    def hits_row(self, row: int) -> bool:
        return self.rows is None or row in self.rows


class Faults:
    """The planted faults of an engine."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._faults: list[Fault] = []
        self.lora: ActiveLora = NO_ADAPTER

    @property
    def on(self) -> bool:
        return bool(self._faults)

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def remove(self, fault: Fault) -> None:
        self._faults.remove(fault)

    # -- inputs -------------------------------------------------------------------------------------------------------

    def apply_to_inputs(self, layer: int, number: int, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """x and routing weights of a call with the faults "input" and "routing"; counts the call for faults of its
        layer.
        """
        for fault in self._faults:
            if fault.layer == layer and fault.left > 0:
                fault.left -= 1
                fault.calls.add(number)
                if fault.stage in ("input", "routing"):
                    changed = (x if fault.stage == "input" else weights).clone()
                    rows = range(len(x)) if fault.rows is None else fault.rows
                    changed[list(rows), 0] = fault.value
                    x, weights = (changed, weights) if fault.stage == "input" else (x, changed)
        return x, weights

    def apply_to_slot(self, layer: int, expert: int, into: Tensor) -> None:
        """Overwrites a slot after its copy, for the fault "transfer"."""
        for fault in self._of("transfer", layer, expert):
            if fault.calls or fault.left:
                into.fill_(255)

    # -- results ------------------------------------------------------------------------------------------------------

    def apply_to_results(self, call: Call, outcome: Outcome) -> None:
        """Changes the rows of a call for faults in the arithmetic, in transfers to the device, and for races."""
        of_expert = call.ids.view(-1)
        k = max(1, call.ids.shape[1])
        for fault in self._faults:
            if fault.layer != call.layer or call.number not in fault.calls or fault.stage in ("input", "routing"):
                continue
            for route in range(call.routes):
                expert = int(of_expert[route])
                if expert < 0 or fault.expert not in (None, expert) or not fault.hits_row(call.first_row + route // k):
                    continue
                self._plant(fault, call, outcome, route, expert)

    def _plant(self, fault: Fault, call: Call, outcome: Outcome, route: int, expert: int) -> None:
        if fault.stage == "transfer" and expert in outcome.slots:
            return  # the bytes in its slot are already wrong
        row = outcome.rows[int(outcome.at(torch.tensor([route], device="cpu")))]  # a view
        flags = outcome.known_flags()
        if fault.stage == "merge":
            flags[route] = UNWRITTEN
            row[:] = fault.value
            return
        if fault.stage in ("race", "transfer"):
            row[:] = fault.value
            if fault.stage == "race" and outcome.host is not None:
                rows, routes = outcome.from_host()
                rows[routes == route] = fault.value
        else:
            x = call.x[route // call.ids.shape[1]][None].cpu()
            *_, (_, recomputed) = self.recompute(call, expert, x, self.weights(call.layer, expert, call.number))
            row.copy_(recomputed[0])
            if outcome.host is not None:
                rows, routes = outcome.from_host()
                rows[routes == route] = recomputed[0]
        flags[route] = int(not bool(torch.isfinite(row).all()))

    # -- recomputation ------------------------------------------------------------------------------------------------

    def weights(self, layer: int, expert: int, call: int) -> dict[str, Tensor]:
        """The expert's weights; the fault "weights" changes the first number."""
        weights = self._store.dequantize(layer, expert)
        for fault in self._of("weights", layer, expert):
            if call in fault.calls:
                weights["gate_up"][0, 0] = fault.value
        return weights

    def recompute(
        self, call: Call, expert: int, x: Tensor, weights: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """`recomputation.stages` with the planted faults and the active adapter."""
        deltas = self.lora.deltas(call.layer, expert)
        return stages(x, weights, self._store.options, self.hook(call, expert), deltas)

    def hook(self, call: Call, expert: int) -> Hook | None:
        """A hook for `recomputation.stages` that plants the faults of the arithmetic; None without faults."""

        def seen(stage: str, value: Tensor) -> Tensor:
            for fault in self._of(stage, call.layer, expert):
                if call.number in fault.calls:
                    value = value.clone()
                    value[:, 0] = fault.value
            return value

        return seen if self.on else None

    def _of(self, stage: str, layer: int, expert: int) -> Sequence[Fault]:
        return [f for f in self._faults if f.stage == stage and f.layer == layer and f.expert in (None, expert)]
