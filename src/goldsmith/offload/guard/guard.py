"""The guard: detects NaN and Inf in a call's results, and finds the stage where they arose.

Detection is cheap: kernels flag their rows, and the merged rows are checked once. If a flag is set, the guard examines
the call stage by stage: input, routing weights, the experts' bytes in the store and in their slots, each product, the
transfer, the merge. The first stage whose inputs are finite and whose result is not is the origin. If a
recomputation of the products stays finite, the cause is a transfer or a race.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planning.call import UNWRITTEN, Call, Outcome
from ..store.expert_store import ExpertStore
from .faults import Faults
from .finiteness import finite
from .report import MOST_ROWS, NumericsError, NumericsReport, NumericsWarning

_ADVICE = {
    "weights": "The checkpoint or the store is at fault, not the computation: check the source, build the store again.",
    "input": "Check the computation before this layer; its output was already not finite.",
    "overflow": "Numbers exceed their dtype: check the scale of the weights and of the input, or use a wider dtype.",
    "transfer": "Bytes changed during a copy: check memory and bus (ECC, cables, overclocking), and report this.",
    "merge": "A row was never computed: this is an error of the engine; please report it with this message.",
    "after": "Check the computation after the experts: the rest of their layer, the last norm, the head.",
    "race": "The same inputs give finite numbers now: check which code writes these buffers, and check the memory.",
}


@dataclass
class NonFiniteFinding:
    """Where and why a call's numbers are not finite: the rows (tokens) with NaN or Inf, and the experts at fault."""

    stage: str
    cause: str
    values: Tensor  # the numbers of that stage, at least one of which is not finite
    rows: Tensor
    experts: tuple[int, ...]
    evidence: tuple[str, ...]


class Guard:
    """Checks every call of an engine, and raises or warns with the origin of a NaN or Inf."""

    def __init__(self, store: ExpertStore, faults: Faults, mode: str) -> None:
        self.store, self.faults, self.mode = store, faults, mode
        self._reported: set[tuple[int | None, str]] = set()
        self._dirty: set[int] = set()  # layers with a NaN or Inf in the current pass over the layers
        self._last = -1

    def begin(self) -> None:
        """A new pass over the layers begins."""
        self._dirty, self._last = set(), -1

    def passed(self, layer: int, first_row: int = 0) -> None:
        """A call of this layer was made; a call of an earlier one begins a new pass."""
        if layer < self._last or (layer == self._last and not first_row):
            self.begin()  # otherwise it is a later layer, or a later piece of the same call
        self._last = layer

    def look(self, call: Call, outcome: Outcome, wrong: bool | None = None) -> None:
        """Raises or warns if the call's rows or their sums are not finite, or were never written.

        wrong: whether a kernel has set a flag; None: check now.
        """
        self.passed(call.layer, call.first_row)
        if wrong is None:
            wrong = bool(outcome.known_flags().numpy().any()) or not finite(outcome.out)
        if wrong:
            self.tell(call, outcome)

    def tell(self, call: Call, outcome: Outcome) -> None:
        finding = self._find(call, outcome)
        if finding is None:
            return
        first = self._dirty <= {call.layer}  # earlier pieces of this call may have failed
        self._dirty.add(call.layer)
        self._raise_or_warn(self._report(call, finding, first))

    def check_output(self, output: Tensor | None, calls: int) -> None:
        """Raises or warns if the model's output after its last experts has NaN or +Inf; a head may mask with -inf."""
        if output is None or self.mode == "off":
            return
        # a row's largest number is NaN or +Inf if it has one; one pass instead of four
        most = output.amax(1)
        bad = torch.isnan(most) | torch.isposinf(most)
        if self._dirty or not bool(bad.any()):  # otherwise it has been reported already
            return
        rows = bad.nonzero()[:, 0].tolist()
        shown = tuple(rows[:MOST_ROWS])
        kind = "nan" if bool(torch.isnan(output).any()) else "inf"
        evidence = ("Every call of the experts returned finite numbers for finite inputs.",)
        self._raise_or_warn(
            NumericsReport(
                None, "after", "after", kind, (), shown, len(rows), (), None, calls, True, evidence, _ADVICE["after"]
            )
        )

    def _raise_or_warn(self, report: NumericsReport) -> None:
        if self.mode == "raise":
            self.begin()
            raise NumericsError(report)
        if (report.layer, report.cause) not in self._reported:
            self._reported.add((report.layer, report.cause))
            warnings.warn(NumericsWarning(report), stacklevel=6)

    # -- stage by stage -----------------------------------------------------------------------------------------------

    def _find(self, call: Call, outcome: Outcome) -> NonFiniteFinding | None:
        used = (call.ids >= 0).to(call.x.device)
        bad_x = ~torch.isfinite(call.x).all(1) & used.any(1)
        if bool(bad_x.any()):
            return NonFiniteFinding(
                "input", "input", call.x[bad_x], bad_x.nonzero()[:, 0], (), (self._before(call, "x"),)
            )
        bad_w = ~torch.isfinite(call.weights).all(1)
        if bool(bad_w.any()):
            rows = bad_w.nonzero()[:, 0]
            evidence = "x is finite, but the routing weights are not: the router is at fault. " + self._before(
                call, "They"
            )
            return NonFiniteFinding("routing", "input", call.weights[bad_w], rows, (), (evidence,))
        flags = outcome.known_flags()
        routes = (flags != 0).nonzero()[:, 0]
        unwritten = (flags == UNWRITTEN).nonzero()[:, 0]
        if len(unwritten):
            return self._unwritten(call, outcome, unwritten)
        if len(routes):
            return self._routes(call, outcome, routes)
        return self._merge(call, outcome)

    def _unwritten(self, call: Call, outcome: Outcome, routes: Tensor) -> NonFiniteFinding:
        rows = outcome.rows_of(routes)
        experts = tuple(sorted(set(call.ids.view(-1)[routes].tolist())))
        evidence = f"{len(routes)} row(s) of these experts were never written; x and routing weights are finite."
        return NonFiniteFinding("merge", "merge", rows, routes // call.ids.shape[1], experts, (evidence,))

    def _routes(self, call: Call, outcome: Outcome, routes: Tensor) -> NonFiniteFinding:
        """The finding for rows that are not finite: the earliest stage over all experts, and every expert that shares
        it.
        """
        of_expert = call.ids.view(-1)
        by_expert: dict[int, Tensor] = {
            e: routes[of_expert[routes] == e] for e in sorted(set(of_expert[routes].tolist()))
        }
        order = ("weights", "gate_up", "activation", "product", "down", "transfer")
        findings: dict[int, NonFiniteFinding] = {e: self._expert(call, outcome, e, at) for e, at in by_expert.items()}
        races = [f for f in findings.values() if f.cause == "race"]
        real = [f for f in findings.values() if f.cause != "race"]
        earliest = min(real or races, key=lambda f: order.index(f.stage))
        same = [f for f in real or races if (f.stage, f.cause) == (earliest.stage, earliest.cause)]
        rows = torch.cat([f.rows for f in same]).unique()
        experts = tuple(sorted(e for f in same for e in f.experts))
        return NonFiniteFinding(earliest.stage, earliest.cause, earliest.values, rows, experts, earliest.evidence)

    def _expert(self, call: Call, outcome: Outcome, e: int, routes: Tensor) -> NonFiniteFinding:
        tokens = routes // call.ids.shape[1]
        weights = self.faults.weights(call.layer, e, call.number)
        damaged = self.store.differs(self.store.raw(call.layer, e), call.layer, e)
        bad = next((name for name, w in weights.items() if not bool(torch.isfinite(w).all())), None)
        if bad is not None or damaged is not None:
            values = weights[bad] if bad else outcome.rows_of(routes[:1])
            evidence = (
                f"{bad} of expert {e} in the store is not finite" if bad else f"Expert {e} is finite in the store"
            )
            if damaged:
                evidence += f", {'and' if bad else 'but'} its bytes are "
                evidence += f"not those that were written (section {damaged}): they changed later."
            else:
                evidence += "; its checksum matches, so the checkpoint already had this."
            return NonFiniteFinding("weights", "weights", values, tokens, (e,), (evidence,))
        transfer = self._slot(call, outcome, e, tokens)
        if transfer is not None:
            return transfer
        x = call.x[tokens.to(call.x.device)].cpu()
        before = f"max |x| = {_largest(x):.3g}, max |gate_up| = {_largest(weights['gate_up']):.3g}"
        for stage, value in self.faults.recompute(call, e, x, weights):
            if not bool(torch.isfinite(value).all()):
                evidence = (
                    f"{before}, all finite, and a recomputation gives it again; the checksum of expert {e} matches."
                )
                return NonFiniteFinding(stage, "overflow", value, tokens, (e,), (evidence,))
            before = f"max |{stage}| = {_largest(value):.3g}"
        return self._not_repeated(call, outcome, e, routes, tokens)

    def _slot(self, call: Call, outcome: Outcome, e: int, tokens: Tensor) -> NonFiniteFinding | None:
        """A finding if the bytes that a device lane read differ from the store's; otherwise None."""
        if e not in outcome.slots:
            return None
        slot, generation = outcome.slots[e]
        if slot.generation != generation or slot.owner != (call.layer, e):
            return None  # the slot was refilled since
        slot.ready.synchronize()
        section = self.store.differs(slot.data, call.layer, e)
        if section is None:
            return None
        evidence = f"Expert {e} matches its checksum in the store, but not in slot {slot.index} (section {section})."
        return NonFiniteFinding(
            "transfer",
            "transfer",
            torch.tensor([float("nan")], dtype=torch.float32, device="cpu"),
            tokens,
            (e,),
            (evidence,),
        )

    def _not_repeated(self, call: Call, outcome: Outcome, e: int, routes: Tensor, tokens: Tensor) -> NonFiniteFinding:
        rows = outcome.rows_of(routes)
        if outcome.host is not None:
            host_rows, at = outcome.from_host()
            own_rows = torch.isin(at, routes)
            if bool(own_rows.any()) and bool(torch.isfinite(host_rows[own_rows.to(host_rows.device)]).all()):
                evidence = f"The rows of expert {e} were finite on the CPU, but are not on the device."
                return NonFiniteFinding("transfer", "transfer", rows, tokens, (e,), (evidence,))
        evidence = (
            f"x, the weights of expert {e} and its checksum are correct, and a recomputation of its rows is finite in "
            "every stage: the error is not reproducible."
        )
        return NonFiniteFinding("down", "race", rows, tokens, (e,), (evidence,))

    def _merge(self, call: Call, outcome: Outcome) -> NonFiniteFinding | None:
        bad = ~torch.isfinite(outcome.out).all(1)
        if not bool(bad.any()):
            return None
        k = call.ids.shape[1]
        rows = bad.nonzero()[:, 0]
        routes = (rows.cpu()[:, None] * k + torch.arange(k, device="cpu")).view(-1)
        kept = (call.ids.view(-1)[routes] >= 0).to(call.weights.device)
        parts = (outcome.rows_of(routes) * call.weights.view(-1)[routes.to(call.weights.device)].unsqueeze(-1))[kept]
        evidence = (
            f"All rows of the experts are finite; max |w y| = {_largest(parts):.3g}, and their sum does not fit "
            f"{str(call.caller_x.dtype).removeprefix('torch.')}."
        )
        return NonFiniteFinding("merge", "overflow", outcome.out[bad], rows, (), (evidence,))

    # -- the report --------------------------------------------------------------------------------------------------

    def _before(self, call: Call, subject: str) -> str:
        before = max((layer for layer in self.store.layers if layer < call.layer), default=None)
        if before is None:
            return f"{subject} arrived like this; there is no layer of experts before this one."
        state = "was not clean" if before in self._dirty else "was clean"
        return f"{subject} arrived like this; layer {before}, the experts before this one, {state}."

    def _report(self, call: Call, finding: NonFiniteFinding, first: bool) -> NumericsReport:
        rows = sorted(set((finding.rows.cpu() + call.first_row).tolist()))
        shown = tuple(rows[:MOST_ROWS])
        lanes = call.assignment.lane_of()
        length = call.positions
        return NumericsReport(
            layer=call.layer,
            stage=finding.stage,
            cause=finding.cause,
            kind="nan" if bool(torch.isnan(finding.values).any()) else "inf",
            experts=finding.experts,
            rows=shown,
            num_rows=len(rows),
            positions=tuple((row // length, row % length) for row in shown) if length else (),
            lane=lanes.get(finding.experts[0]) if finding.experts else None,
            call=call.number,
            first=first,
            evidence=finding.evidence,
            advice=_ADVICE[finding.cause],
        )


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
