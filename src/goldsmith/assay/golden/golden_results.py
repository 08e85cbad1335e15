"""GoldenResults: the golden on the inputs of one case, its bounds and its ensemble, each computed on first use.

Names are as in a run: outputs `y`, saved results `saved.h`, stages `h`, gradients `x.grad` and `h.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError, listening
from ..bounds import running_errors
from ..bounds.bounded import Bounded, unit_roundoff, unproven
from ..declare.axis_names import axis_names
from ..declare.returned_values import name_gradients, names_of, only_tensors
from ..execute.memory import aliases, overlapping
from ..execute.records import CandidateRun, Material
from ..execute.tracer import Tracer
from ..noise import ensemble, exponent_rounding, jitter
from ..support import deadline, memory_errors
from ..support.output_gradients import gradients_of
from . import choice_operators, kinks, nearby_inputs, other_answers, self_check
from .creation_order import CreationOrder
from .golden_error import GoldenError, golden_errors
from .golden_tensor import GoldenTensor

RUNS = 8  # legal orders in an ensemble
Runs = list[dict[str, Tensor]]
Lacks = Callable[[float], bool] | None


def _no_time(seconds: float) -> bool:
    return deadline.lacks(seconds, "honest runs of the golden in other orders, so only CERTAIN findings are possible")


class GoldenResults:
    """All golden values, bounds and runs that the tensors of one candidate run are judged by.

    run: supplies the dtypes of the results and the output gradients.
    decisions: stage -> the candidate's legal decision, which the golden's stage returns instead of its own.
    """

    def __init__(
        self, material: Material, run: CandidateRun, decisions: Mapping[str, Tensor] | None = None, seed: int = 0,
        compute: torch.dtype | None = None, stored: Mapping[str, torch.dtype] | None = None,
    ):  # fmt: skip
        self.material, self.run, self.seed = material, run, seed
        self.decisions = dict(decisions or {})
        self.counts: dict[str, int] = {}
        self.decisions_used: set[str] = set()  # decisions that stages of the golden returned
        self.outputs: tuple[str, ...] = ()  # names that the golden returned
        self.order: list[str] = []  # stages, outputs, gradients and their stages, as the golden computes them
        self.differentiable: frozenset[str] = frozenset()  # its outputs that a gradient can flow into
        self.leaves = {n: self_check.exact(t) for n, t in material.inputs.items()}
        self.leaves.update({f"grad_{n}": self_check.exact(t) for n, t in run.cotangents.items()})
        stages = {n: t.dtype for n, t in run.stages.items() if not (n in self.decisions or n.startswith("saved."))}
        self.stores = stages | {n: t.dtype for n, _, t in run.results() if t is not None}
        for name in material.target.wanted_grads(material.inputs):
            if run.grads.get(f"{name}.grad") is None:
                self.stores[f"{name}.grad"] = material.inputs[name].dtype
        for stage, name in material.target.stored.items():
            if name in material.inputs:
                self.stores.setdefault(stage, material.inputs[name].dtype)
        self.stores.update(stored or {})
        self.compute = compute or material.target.compute_dtype(material.inputs)
        self.unable = ""  # why the golden has no runs in the declared 16 bits
        self._creation_numbers: dict[str, int] = {}  # output -> operator of the golden whose whole result it is
        self._made_in: list[str] | None = None  # names of the outputs in the order of their computation
        self._written: dict[bool, dict[str, Tensor]] = {}

    # the golden as a function of its leaves

    def evaluate(
        self, leaves: Mapping[str, Tensor], *, gradients: bool = True, early: bool = False, look: bool = False
    ) -> dict[str, Tensor]:
        """Outputs, stages and gradients of the golden, in the precision of `leaves`.

        early: store outputs as soon as they are computed, so that the golden goes on with the stored values.
        look: find out the order in which the golden computes its outputs, which costs Python time for each operator.
        """
        target, run = self.material.target, self.run
        sent = [n for n in run.cotangents if gradients]
        wanted = target.wanted_grads(self.material.inputs) if target.backward is not None and gradients else ()
        tracer = Tracer(live=True, substitute=self.decisions, store=self._store)
        with torch.enable_grad(), listening(tracer), choice_operators.replaced(self.decisions):
            placed = {n: leaves[n].detach().requires_grad_(n in wanted) for n in self.material.inputs}
            supply = self.material.ordered(placed)
            stores = self._stores_early if early else {}
            creation = CreationOrder(stores) if stores or (look and self._several) else None
            with creation or nullcontext():
                named = self._named(target.bound("golden", supply)(supply))
            if creation:
                self._made_in, self._creation_numbers = creation.sorted(named), creation.numbered(named)
            named = {n: self._store(n, t) for n, t in named.items()}
            self.outputs = tuple(f"saved.{n}" if n in target.saved else n for n in named)
            if gradients:
                self.differentiable = frozenset(n for n, t in named.items() if t.requires_grad)
            results = {f"saved.{n}" if n in target.saved else n: t for n, t in named.items()}
            order = [*tracer.records, *(f"saved.{n}" if n in target.saved else n for n in self._made_in or named)]
            if sent:
                results.update(self._gradients(supply, named, leaves, sent, wanted, tracer))
        self.decisions_used |= tracer.substituted
        grads = [n for n in results if n.removesuffix(".grad") in wanted]
        self.order = list(dict.fromkeys([*order, *tracer.records, *grads]))
        results.update({n: t for n, t in tracer.records.items() if n not in results})
        for name in target.saved:
            if f"saved.{name}" not in results and name in tracer.records:
                results[f"saved.{name}"] = tracer.records[name]
        return {n: t.detach() for n, t in results.items()}

    @property
    def _several(self) -> bool:
        return len(self.run.outputs) + len(self.run.saved) > 1

    @property
    def read_back(self) -> torch.dtype | None:
        """The dtype of outputs coarser than the compute precision, which kernels may read back rounded; else None."""
        dtypes = [t.dtype for t in self.run.outputs.values() if t.dtype.is_floating_point]
        coarsest = max(dtypes, key=unit_roundoff, default=self.compute)
        return coarsest if unit_roundoff(coarsest) > unit_roundoff(self.compute) else None

    @cached_property
    def _stores_early(self) -> dict[int, Callable[[Tensor], object]]:
        """Number of an operator of the golden -> the function that stores the output it makes."""
        if not self._several or self.read_back is None:
            return {}
        self._count("plain")
        with self_check.default_dtype(torch.float64):
            self.evaluate(self.leaves, gradients=False, look=True)
        return {number: partial(self._store, name) for name, number in self._creation_numbers.items()}

    def _store(self, name: str, value: Tensor) -> Tensor:
        first = name.partition("#")[0]  # a repeated stage is stored like its first occurrence
        dtype = self.stores.get(name, self.stores.get(f"saved.{name}"))
        if dtype is None and first in self.material.target.stored:
            dtype = self.stores.get(first)
        return value if dtype is None or not value.is_floating_point() else running_errors.stored(value, dtype)

    def _named(self, result: object) -> dict[str, Tensor]:
        """Outputs of the golden by name; it may return all declared outputs, or only those that are not saved."""
        declared, saved = self.material.target.outputs, self.material.target.saved
        source = "the target declares"
        if declared is None and self.run.names and not isinstance(result, Mapping):
            declared, source = self.run.names, "the candidate returned"
        if declared is not None and saved:
            count = len(result) if isinstance(result, list | tuple | Mapping) else 1
            if count != len(declared):
                declared = tuple(n for n in declared if n not in saved)
        pairs = names_of(result, declared, "golden", source)
        if pairs and all(value is None for _, value in pairs):
            raise TargetError("golden: returned None; it must return a tensor, or a tuple or dict of tensors")
        return only_tensors(pairs, "golden")

    def _gradients(
        self, supply: dict[str, Any], named: dict[str, Tensor], leaves: Mapping[str, Tensor], sent: list[str],
        wanted: tuple[str, ...], tracer: Tracer,
    ) -> dict[str, Tensor]:  # fmt: skip
        target = self.material.target
        cotangents = {f"grad_{n}": leaves[f"grad_{n}"] for n in sent}
        # an output of another shape than the golden's is wrong, and its output gradient fits nothing here
        fitting = [n for n in sent if n not in named or named[n].shape == cotangents[f"grad_{n}"].shape]
        if target.golden_backward is not None and fitting == sent:
            names = {**supply, **tracer.records, **named, **cotangents}
            result = target.bound("golden_backward", names)(names)
            named_grads = name_gradients(result, wanted, "golden_backward")
            return {f"{n}.grad": torch.zeros_like(supply[n]) if g is None else g for n, g in named_grads.items()}
        stages, results = dict(tracer.graph), {**tracer.graph, **named}  # an output may be a stage of the golden
        able = [n for n in fitting if n in results and results[n].requires_grad]
        sources = {**{n: supply[n] for n in wanted}, **{n: t for n, t in stages.items() if n not in wanted}}
        if not able:
            return {f"{n}.grad": torch.zeros_like(supply[n]) for n in wanted}
        grads = gradients_of(
            [results[n] for n in able], list(sources.values()), [cotangents[f"grad_{n}"] for n in able]
        )
        return {
            f"{n}.grad": torch.zeros_like(sources[n]) if g is None else g
            for n, g in zip(sources, grads, strict=True)
            if g is not None or n in wanted
        }

    # results, computed on first use

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """The golden in float64."""
        if "bounded" in self.__dict__:
            return {n: b.value for n, b in self.bounded.items()}
        return self.plain

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        """The golden in float64 without bounds, for bitwise comparison with another `plain`."""
        self._count("plain")
        with golden_errors(), self_check.default_dtype(torch.float64):
            return self.evaluate(self.leaves)

    @cached_property
    def shared(self) -> set[tuple[str, str]]:
        """Pairs of golden results, or result and input, that share memory: a candidate's may share it too.

        A result that shares memory with itself is a pair of its name.
        """
        self._count("plain")
        with golden_errors(), self_check.default_dtype(torch.float64):
            values = self.evaluate(self.leaves)
        results = {n: values[n] for n, _, _ in self.run.results() if n in values}
        return aliases(results, {n: self.leaves[n] for n in self.material.inputs}) | overlapping(results)

    @cached_property
    def bounded(self) -> dict[str, Bounded]:
        """The golden in float64, with a proven rounding bound for every result."""
        self._count("bounds")
        with golden_errors():
            try:
                return running_errors.running_bounds(
                    partial(self.evaluate, early=True, look=True), self.leaves, compute=self.compute,
                    stores=self.stores, dot=self.material.target.dot, read_back=self.read_back,
                )  # fmt: skip
            except (GoldenError, TargetError, ImportError):
                raise
            except Exception as error:
                if memory_errors.out_of_memory(error):
                    raise
                with self_check.default_dtype(torch.float64):
                    values = self.evaluate(self.leaves)  # raises if the golden itself raises
                reason = f"the error analysis cannot follow the golden ({type(error).__name__}: {error})"[:200]
                return {n: unproven(value, reason) for n, value in values.items()}

    @cached_property
    def ensemble(self) -> list[dict[str, Tensor]]:
        """Legal runs of the golden in compute precision; empty if there is no time for them."""
        self._count("ensemble", RUNS)
        runs = self._legal(RUNS, self.seed, self.material.target.dot, self.material.nudged, _no_time)
        if runs and self.compute.itemsize == 2:  # torch's operator may round less than a formula, or elsewhere
            own = self.unmodified(False)
            own = {n: t.to(self.stores.get(n, self.compute)) if t.is_floating_point() else t for n, t in own.items()}
            runs += [own] if own else []
        return runs

    def _legal(self, k: int, seed: int, dot: str, nudged: bool = False, lacks: Lacks = None) -> Runs:
        """Legal runs in compute precision, or in float32 if the golden uses an operator that lacks 16 bits."""
        try:
            return self._runs(self.compute, k, seed, dot, nudged, lacks)
        except (GoldenError, NotImplementedError) as error:
            if self.compute.itemsize != 2:
                raise
            self.unable = str(error)
            return self._runs(torch.float32, k, seed, dot, nudged, lacks)

    def _runs(self, compute: torch.dtype, k: int, seed: int, dot: str, nudged: bool, lacks: Lacks) -> Runs:
        early = cycle((False, True))
        with golden_errors():
            return ensemble.legal_runs(
                lambda leaves: self.evaluate(leaves, early=next(early)), self.leaves, compute=compute,
                stores=self.stores, k=k, seed=seed, dot=dot, nudged=nudged, read_back=self.read_back, lacks=lacks,
            )  # fmt: skip

    @cached_property
    def swings(self) -> kinks.Swings:
        """Jumps of gradients when inputs move by less than a rounding: at kinks and ties several are legal."""
        self._count("plain", kinks.NUDGES)
        inputs = {n: self.leaves[n] for n in self.material.inputs}
        with golden_errors(), self_check.default_dtype(torch.float64):
            return kinks.Swings(self.evaluate, self.leaves, inputs, self.values, unit_roundoff(self.compute))

    def kink(self, name: str) -> Tensor:
        """Mask of the elements of a gradient that lie on a kink; all False for other results."""
        swing = self.swings.get(name)
        if swing is None:
            return torch.zeros(self.values[name].shape, dtype=torch.bool, device=self.values[name].device)
        return swing.kink(self.bounded[name], self.stores.get(name, self.compute), [])

    @cached_property
    def honest(self) -> dict[str, Tensor]:
        """One run of the golden in compute precision, stores included: an overflow in it is legal."""
        self._count("plain")
        return self._legal(1, self.seed, self.material.target.dot)[0]

    def unmodified(self, own: bool) -> dict[str, Tensor]:
        """A run of the golden without rewritten operators, in compute precision, or (own) in the dtypes of the inputs.

        torch's operators treat NaN, Inf and the ends of a dtype in ways that no formula shows: attention on a CPU
        turns a NaN query into 0. The candidate need not do better than the golden. Empty if the golden cannot run so.
        """
        if own not in self._written:
            self._count("plain")
            dtypes = {n: t.dtype for n, t in self.material.inputs.items()}
            dtypes |= {f"grad_{n}": t.dtype for n, t in self.run.cotangents.items()}
            narrowed = {
                n: t.to(dtypes[n] if own else self.compute) if t.is_floating_point() else t
                for n, t in self.leaves.items()
            }
            floating = [t.dtype for t in narrowed.values() if t.is_floating_point()]
            try:
                with self_check.default_dtype(floating[0] if floating else self.compute):
                    self._written[own] = self.evaluate(narrowed)
            except Exception as error:  # it ran in float64, where it is judged
                if memory_errors.out_of_memory(error):
                    raise
                self._written[own] = {}
        return self._written[own]

    @cached_property
    def second_ensemble(self) -> list[dict[str, Tensor]]:
        """A second ensemble of legal runs; for a "tf32" target its first half keeps all bits of the factors."""
        self._count("ensemble", RUNS)
        dots = dict.fromkeys(("ieee", self.material.target.dot))
        each, nudged = RUNS // len(dots), self.material.nudged
        return [run for at, dot in enumerate(dots) for run in self._legal(each, self.seed + 7 + at, dot, nudged)]

    @cached_property
    def jittered(self) -> list[dict[str, Tensor]]:
        """Unmodified runs of the golden in compute precision, with every number rounded once more."""
        self._count("plain", jitter.RUNS)
        narrowed = {n: t.to(self.compute) if t.is_floating_point() else t for n, t in self.leaves.items()}
        with self_check.default_dtype(self.compute):
            return jitter.runs(self.evaluate, narrowed, self.seed)

    @cached_property
    def nearby(self) -> dict[str, Tensor]:
        self._count("plain", nearby_inputs.DRAWS)
        with golden_errors(), self_check.default_dtype(torch.float64):
            decided = self if self.decisions else self._decided()
            return nearby_inputs.moves(decided.evaluate, self.leaves, self.values, self.compute)

    @cached_property
    def nudged(self) -> Runs:
        """The golden in float64 on inputs that move by a hair, so that equal ones differ."""
        self._count("plain", other_answers.NUDGES)
        with golden_errors(), self_check.default_dtype(torch.float64):
            return other_answers.nudged_runs(partial(self.evaluate, gradients=False), self.leaves)

    @cached_property
    def exponent_rounding(self) -> float:
        """The relative error that rounded exponents may make, from one run of the golden in float64."""
        self._count("plain")
        with golden_errors(), self_check.default_dtype(torch.float64):
            return exponent_rounding.relative(self.evaluate, self.leaves, self.compute)

    def _count(self, what: str, runs: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + runs

    def reference(self, name: str, kind: str, *, noise: bool = True) -> GoldenTensor | None:
        """The GoldenTensor that tensor `name` is judged by, or None if the golden has no such result."""
        bounded = self.bounded.get(name)
        if bounded is None:
            return None
        return GoldenTensor(
            name=name,
            kind=kind,
            store=self.stores.get(name, self.compute),
            bounded=bounded,
            ensemble=[r[name] for r in self.ensemble if name in r] if noise else [],
            segments=self.material.target.segments_of(name, self.material.sizes, bounded.value.shape),
            axes=axis_names(bounded.value.shape, self.material.sizes),
            compute=self.compute,
            tensor_cores=self.material.candidate_device.type == "cuda",
        )

    @cached_property
    def checked(self) -> self_check.SelfCheck:
        """What the checks of the golden itself find: see golden.self_check."""
        wanted = self.material.target.wanted_grads(self.material.inputs)
        visible = [n for n in self.run.outputs if not n.startswith("saved.")]
        fixed = self._decided()

        def forward(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            self._count("self_check")
            results = fixed.evaluate({**self.leaves, **leaves}, gradients=False)
            return {n: results[n] for n in visible if n in results}

        def gradient(leaves: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
            self._count("self_check")
            results = fixed.evaluate({**self.leaves, **leaves, **cotangents})
            return {n: results[f"{n}.grad"] for n in wanted}

        inputs = {n: self.leaves[n] for n in self.material.inputs}
        shapes = {n: tuple(self.run.outputs[n].shape) for n in visible}
        sent = self.run.cotangents  # a candidate output without a gradient gets none in the golden either
        return self_check.self_check(
            forward, gradient if sent else None, inputs, shapes=shapes, sent=tuple(sent),
            surrogate=self.material.target.surrogate, seed=self.material.seed,
            wide=any(t.dtype == torch.float64 for t in self.material.inputs.values()),
        )  # fmt: skip

    def _decided(self) -> GoldenResults:
        """These results with the golden's own decisions fixed, so that none flips within a central difference."""
        if not self.material.target.decisions:
            return self
        own = {n: self.values[n] for n in self.material.target.decisions if n in self.values}
        return GoldenResults(self.material, self.run, own, self.seed)
