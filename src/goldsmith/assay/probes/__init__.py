"""The probes: functions of an Examination, in their own files. DEFAULT lists them in running order.

Probes without a function look at what every run records, such as the guard bands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...core.tracing import TargetError
from ..judge.examination import Examination
from . import calls, layouts, repeats, scaling, second_call, statistics, taint, values


@dataclass(frozen=True)
class Probe:
    """A probe's name, a summary, and its function; None if it only inspects the runs of other probes."""

    name: str
    summary: str
    run: Callable[[Examination], None] | None


DEFAULT = (
    Probe("values", "outputs, saved tensors, gradients against proven bounds", values.run),
    Probe("ensemble", "noise floor and slope of legal summation orders", None),
    Probe("decisions", "discrete results: legality, margins, ties", None),
    Probe("statistics", "zero share, signs, permutation, transposition, shift", statistics.run),
    Probe("poison", "uninitialised memory holds NaN, in every run", None),
    Probe("guard", "bands around every buffer, in every run", None),
    Probe("alias", "inputs and results modified or shared, in every run", None),
    Probe("second_call", "again on dirty memory; other inputs and back; backward twice", second_call.run),
    Probe("layouts", "inputs and output gradients strided, offset, expanded", layouts.run),
    Probe("repeats", "three repeats; other threads, another order of programs", repeats.run),
    Probe("scaling", "2^12 and 2^-12; zeros, equal values, an offset; NaN, Inf", scaling.run),
    Probe("taint", "first, last and a random slice of each axis", taint.run),
    Probe("calls", "many plain calls, without guard bands; watched after the return", calls.run),
    Probe("float32", "16-bit targets also with float32 inputs", None),
)
NAMES = tuple(p.name for p in DEFAULT)
# one run and two repeats instead of about thirty runs, for cases that do not go through all probes
QUICK = tuple(n for n in NAMES if n not in ("layouts", "scaling", "taint"))
LEVELS = {"default": NAMES, "all": NAMES, "quick": QUICK}


def select(names: str | tuple[str, ...] | list[str]) -> frozenset[str]:
    """The names of the probes to run, from names of levels and of probes.

    "values" is always included, because the other probes compare with its run.
    """
    chosen = {"values"}
    for name in [names] if isinstance(names, str) else list(names):
        if name not in NAMES and name not in LEVELS:
            exist = ", ".join([*LEVELS, *NAMES])
            raise TargetError(f"probes: {name!r} is neither a level nor a probe; there are: {exist}")
        chosen.update(LEVELS.get(name, (name,)))
    return frozenset(chosen)
