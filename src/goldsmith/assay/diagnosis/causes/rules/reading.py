"""Reading: the evidence of one case with the derived values that several rules need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....report.results import CERTAIN, QUALITY, SYSTEMATIC, Finding
from ...facts.evidence import ErrorPattern, Evidence, Influence, MemoryFact, Ratio, RunFact
from ...facts.raised_error import RaisedError
from ...facts.spans import of_indices, say

EXACT, SEEN, LIKELY, HINT, FAINT = 0.95, 0.9, 0.75, 0.5, 0.3
WEAK = 0.4  # the highest score that makes no claim: it fits, and so do other explanations
PLAIN = ("values", "ensemble", "statistics", "decisions", "poison", "guard", "alias", "float32")
_ELEMENTWISE = frozenset(
    """mul add sub div neg abs sign exp log sqrt rsqrt sin cos tanh sigmoid relu clamp clamp_min clamp_max where
    gt ge lt le eq ne logical_and logical_or logical_not bitwise_and bitwise_or bitwise_xor bitwise_not pow square round
    floor ceil trunc remainder floor_divide reciprocal maximum minimum view reshape unsqueeze squeeze expand
    permute transpose t slice select alias detach clone _to_copy lift_fresh ones_like zeros_like full_like
    _unsafe_view scalar_tensor""".split()
)
_OF_SUMS = frozenset("truncated_reduction overwritten_accumulator uninitialised_accumulator lost_update".split())
_RUNS = ("second", "back", "other", "layout", "scale", "offset", "flat", "nan", "inf", "repeat", "debug")
_ALL = 0.9  # of the wrong elements
_NOISE = 16.0  # in units of the dtype's rounding; smaller errors are ignored


@dataclass(frozen=True)
class Match:
    """A rule's answer: how well the evidence fits (raw, before calibration), its sentences and parameters."""

    score: float
    sentences: tuple[str, ...]
    params: dict[str, Any] = field(default_factory=dict)


class Reading:
    """One failing case's evidence, with derived values computed at most once."""

    def __init__(self, evidence: Evidence):
        self.e = evidence
        same = evidence.golden is not None and evidence.got is not None and evidence.golden.shape == evidence.got.shape
        self.g: Tensor | None = evidence.golden if same else None
        self.y: Tensor | None = evidence.got if same else None

    # the wrong tensor

    @cached_property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """(got, golden) without NaN and Inf, if the tensor is wrong and has at least two elements."""
        if self.y is None or self.g is None or self.y.numel() < 2 or not self.wrong_count:
            return None
        finite = torch.isfinite(self.y) & torch.isfinite(self.g)
        if not bool(finite.any()):
            return None
        zero = torch.zeros((), dtype=torch.float64, device=self.g.device)
        return torch.where(finite, self.y, zero), torch.where(finite, self.g, zero)

    @cached_property
    def unit(self) -> float:
        """Relative rounding of the case's dtype."""
        kind = getattr(torch, self.e.dtype, torch.float32)
        return torch.finfo(kind).eps if kind.is_floating_point else 0.0

    @cached_property
    def wrong(self) -> Tensor | None:
        """Elements that are wrong by more than rounding. Small errors next to large ones count as right."""
        if self.y is None or self.g is None or not self.y.numel():
            return None
        special = ~torch.isfinite(self.y) & ~((self.y == self.g) | (self.y != self.y) & (self.g != self.g))
        error = (self.y - self.g).abs().nan_to_num(0.0, 0.0, 0.0)
        size = self.g.abs().nan_to_num(0.0, 0.0, 0.0)
        rms = float(size.square().mean().sqrt())
        noise = _NOISE * self.unit * torch.clamp(size, min=rms)
        return (error > torch.clamp(noise, min=float(error.max()) * 1e-6)) | special

    @cached_property
    def wrong_count(self) -> int:
        return 0 if self.wrong is None else int(self.wrong.sum())

    @cached_property
    def share(self) -> float:
        """The share of wrong elements."""
        return self.wrong_count / self.wrong.numel() if self.wrong is not None and self.wrong.numel() else 0.0

    @cached_property
    def relative(self) -> float:
        """|y - g| / |g|"""
        if self.pair is None:
            return 0.0
        y, g = self.pair
        norm = float(g.norm())
        return float((y - g).norm()) / norm if norm else 0.0

    @cached_property
    def alike(self) -> float:
        """<y, g> / (|y| |g|)"""
        if self.pair is None:
            return 0.0
        y, g = self.pair
        norm = float(y.norm() * g.norm())
        return float((y * g).sum()) / norm if norm else 0.0

    @cached_property
    def zeros(self) -> float:
        """Of the golden's nonzero elements, how many are exactly zero in the candidate."""
        if self.y is None or self.g is None:
            return 0.0
        nonzero = (self.g != 0) & torch.isfinite(self.g)
        count = int(nonzero.sum())
        return float(((self.y == 0) & nonzero).sum()) / count if count else 0.0

    @cached_property
    def spans(self) -> dict[int, list[tuple[int, int]]]:
        """Per axis, the inclusive ranges that hold wrong elements; without axes that are wrong throughout."""
        if self.wrong is None or not self.wrong_count:
            return {}
        out = {}
        for axis in range(self.wrong.dim()):
            others = [d for d in range(self.wrong.dim()) if d != axis]
            flags = self.wrong.any(dim=others) if others else self.wrong
            if not bool(flags.all()):
                out[axis] = of_indices(flags.nonzero().flatten().tolist())
        return out

    @cached_property
    def block(self) -> bool:
        """True if the wrong elements fill the product of their ranges: a block, not a scatter."""
        if self.wrong is None or not self.spans:
            return False
        inside = torch.ones_like(self.wrong)
        for axis, spans in self.spans.items():
            flags = torch.zeros(self.wrong.shape[axis], dtype=torch.bool, device=self.wrong.device)
            for lo, hi in spans:
                flags[lo : hi + 1] = True
            shape = [1] * self.wrong.dim()
            shape[axis] = -1
            inside = inside & flags.view(shape)
        return self.wrong_count >= 0.9 * int(inside.sum())

    def length(self, axis: int) -> int:
        return self.wrong.shape[axis] if self.wrong is not None else 0

    # the report

    def findings(self, probe: str) -> list[Finding]:
        return [f for f in self.e.report.findings if f.probe == probe and f.rung != QUALITY]

    def finding(self, *kinds: str, probe: str | None = None) -> Finding | None:
        """The first finding of one of these kinds, of one probe or of any."""
        return next((f for f in self.e.report.findings if f.kind in kinds and probe in (None, f.probe)), None)

    @cached_property
    def plain_wrong(self) -> bool:
        """True if the first call is wrong, on the case's own inputs, layouts and magnitudes."""
        if self.e.error:
            return True
        for f in self.e.report.findings:
            plainly = f.probe in PLAIN and f.rung != QUALITY and label(f) in ("", "values", "debug outputs")
            if plainly and not self.chosen_right(f):
                return True
        return not self.e.report.findings and bool(self.wrong_count)

    def chosen_right(self, f: Finding) -> bool:
        """True if a decision with findings equals the golden's in the first run: it is wrong only in another run."""
        if f.probe != "decisions":
            return False
        got, golden = self.e.other.get(f.tensor, (None, None)) if f.tensor != self.e.tensor else (self.y, self.g)
        return got is not None and golden is not None and got.numel() > 0 and torch.equal(got, golden)

    @cached_property
    def numbers_wrong(self) -> bool:
        """True if the first call's own numbers are certainly wrong, so that other runs can be compared with it."""
        findings = [f for f in self.e.report.findings if f.probe == "values" and f.rung == CERTAIN]
        return any(label(f) in ("", "values", "debug outputs") for f in findings)

    @cached_property
    def made_of_nothing(self) -> bool:
        """True if elements with NaN were written, but computed from unwritten memory."""
        return any(self.e.tensor in run.computed for run in self.runs("zeroed memory"))

    @cached_property
    def nothing_there(self) -> bool:
        """True if the golden is 0 in all unwritten elements, and all its nonzero elements were written."""
        if self.y is None or self.g is None:
            return False
        left = torch.isnan(self.y) & ~torch.isnan(self.g)
        return bool(left.any()) and not bool(self.g[left].any()) and bool((self.g != 0).any())

    @cached_property
    def explained(self) -> bool:
        """True if a ratio or a rearrangement gives the whole error."""
        return self.ratio() is not None or bool(self.e.permutations)

    @cached_property
    def unsteady(self) -> bool:
        """True if a repeated call is wrong although the first is right: then other runs say nothing."""
        again = [r for name in ("second call", "repeat", "layout contiguous") for r in self.runs(name)]
        return not self.plain_wrong and any(not r.right for r in again)

    @cached_property
    def systematic(self) -> list[Finding]:
        return [f for f in self.e.report.findings if f.rung == SYSTEMATIC]

    @cached_property
    def raised(self) -> RaisedError:
        """What the exception says: that of the plain run, or that of a later one."""
        if self.e.raised is not None:
            return self.e.raised
        finding = self.finding("raised")
        return RaisedError.read(str(finding.values["error"])) if finding is not None else RaisedError()

    # runs

    def runs(self, prefix: str) -> Iterator[RunFact]:
        """Results of the runs whose names begin with this; a finding with such a label also counts."""
        known = set()
        for name, fact in self.e.runs.items():
            known.add(plain(name))
            if plain(name).startswith(prefix):
                of_run = [f for f in self.e.report.findings if plain(label(f)) == plain(name)]
                texts = [*once([f.text for f in of_run][:2]), fact.text]
                kinds = frozenset(f.kind for f in of_run)
                yield replace(fact, text="; ".join(texts), kinds=kinds) if of_run else fact
        for f in self.e.report.findings:
            name = plain(label(f)) or (plain(f.probe) if f.probe in ("second_call",) else "")
            if f.rung != QUALITY and name and name not in known and name.startswith(prefix):
                yield RunFact(name, wrong=(f.tensor,), same=False, text=f.text, kinds=frozenset({f.kind}))

    def fails(self, prefix: str) -> RunFact | None:
        """The first run of that name that is wrong or raises."""
        return next((r for r in self.runs(prefix) if not r.right), None)

    def right(self, prefix: str) -> bool:
        """True if there is a run of that name and all such runs are right."""
        facts = list(self.runs(prefix))
        return bool(facts) and all(r.right for r in facts)

    def nan_gone(self, name: str) -> RunFact | None:
        """The run of that name, if the wrong tensor holds no NaN in it but holds some in every plain run.

        Compiled arithmetic does not preserve a NaN's bits; a run with other memory shows where the NaN came from.
        """
        if self.y is None or self.g is None or self.memory("never_written", "stray_read") is not None:
            return None
        if not bool((torch.isnan(self.y) & ~torch.isnan(self.g)).any()):
            return None
        run, tensor = self.e.runs.get(name), self.e.tensor
        steady = all(tensor in r.nan for r in self.runs("repeat"))
        return run if run is not None and steady and not run.error and tensor not in run.nan else None

    @cached_property
    def sums_nothing(self) -> bool:
        """True if the golden computes the tensor element by element, as far as its operators are known."""
        return bool(self.e.operators) and self.e.operators <= _ELEMENTWISE

    @cached_property
    def ruled_out(self) -> frozenset[str]:
        """Causes that are impossible: sums without a sum, counts in a mask."""
        return _OF_SUMS if self.sums_nothing or self.e.stored == "bool" else frozenset()

    # memory, fits, patterns, influence

    def memory(self, *kinds: str) -> MemoryFact | None:
        """The first fact of one of these kinds; those of the wrong tensor come first."""
        facts = sorted((m for m in self.e.memory if m.kind in kinds), key=lambda m: m.tensor != self.e.tensor)
        return facts[0] if facts else None

    def first_nonfinite(self, cause: str, score: float) -> Match | None:
        """The match of a cause that the first NaN or Inf shows."""
        origin = self.e.nonfinite_origin
        if origin is None or origin.cause != cause:
            return None
        return Match(score, origin.sentences, {"stage": origin.stage, "operation": origin.op})

    def ratio(self) -> Ratio | None:
        """A constant ratio: of the whole tensor before a segment's."""
        ratios = [r for r in self.e.ratios if abs(r.ratio - 1) > 4 * max(r.spread, 1e-12)]
        return min(ratios, key=lambda r: (r.scope != "tensor", r.spread), default=None)

    def pattern(self, *kinds: str) -> ErrorPattern | None:
        patterns = [p for p in self.e.permutations if p.kind in kinds and p.match >= 0.98]
        return max(patterns, key=lambda p: p.match, default=None)

    @property
    def influences(self) -> list[Influence]:
        """Influences, without inputs that have none at all: no partial reduction explains those."""
        return [i for i in self.e.influence.values() if not self.absent(i)]

    @cached_property
    def left_to_the_next(self) -> str:
        """A sentence, if rows of the result that depend only on their own inputs hold values of earlier rows;
        otherwise "".
        """
        first = any(spans[0][0] > 0 for spans in self.spans.values())
        leak = next((i for i in self.influences if i.onto == "later" and not i.missing and i.reached > _ALL), None)
        if leak is None or not first:
            return ""  # no earlier row moves it, so it is wrong for another reason
        return (
            f"{leak.input}[axis {leak.axis}: {say(leak.extra)}] reaches later rows, each of which the "
            "golden computes independently; the first row is right"
        )

    def reached_by(self, i: Influence) -> bool:
        """True if an input's missing slices are the result's wrong ones: then nothing is summed over them."""
        return bool(i.missing) and any(list(i.missing) == spans for spans in self.spans.values())

    def absent(self, i: Influence) -> bool:
        """True if the input has no influence along its whole axis."""
        if i.none:
            return True
        if len(i.missing) != 1 or i.missing[0][0] or not i.missing[0][1]:
            return False
        length = i.missing[0][1] + 1
        pair = self.e.other.get(f"{i.input}.grad")
        if pair is not None and pair[1] is not None and pair[1].dim() > i.axis:
            return length == pair[1].shape[i.axis]
        return length in self.e.sizes.values()


def once(texts: list[str]) -> list[str]:
    """The sentences without repetitions: the same opening with other numbers, or the same advice at the end."""
    sentences: list[str] = []
    for text in texts:
        opening, advice = text.partition(": ")[0], text.rpartition("; ")[2]
        if any(k.partition(": ")[0] == opening for k in sentences):
            continue
        sentences = [*(k.removesuffix(f"; {advice}") for k in sentences), text]
    return sentences


def plain(name: str) -> str:
    """A run's name in one spelling: `values:offset` and `offset` are the same."""
    return name.lower().replace("_", " ").replace(":", " ").removeprefix("values ").strip()


def label(finding: Finding) -> str:
    """The run of a finding, if it is the plain run or one of the other runs; otherwise ""."""
    first = plain(finding.run).split(" ")[0].split("(")[0]
    known = first in _RUNS or finding.run == "values" or re.fullmatch(r"\d+ threads?", finding.run)
    return finding.run if known else ""


def half_open(spans: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Inclusive ranges as [first, one past the last]."""
    return [[lo, hi + 1] for lo, hi in spans]


def close(a: Tensor, b: Tensor, unit: float, tolerance: float = 1e-3) -> bool:
    """True if two tensors agree within a thousandth of their size (more if rounding is coarser)."""
    size = float(b.norm())
    return a.shape == b.shape and 0 < size < torch.inf and float((a - b).norm()) <= max(tolerance, 8 * unit) * size
