"""Results of timed calls are judged like any others; which ones, the judge chooses after the calls."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...execute.records import CandidateRun, Material
from ...judge.examination import Examination
from ...probes import decisions, values
from ..isolation.candidate_process import CandidateProcess
from .impossibility import Impossible
from .requests import timed_results
from .timed_calls import next_salt, varied

VERIFIED_BYTES, VERIFY_LEAST, VERIFY_SECONDS = 32 << 20, 6, 1.0  # results that are judged
CHAIN_VERIFIED = 4  # calls of a chain


def verify_calls(
    process: CandidateProcess, examination: Examination, materials: Sequence[Material],
    schedule: Sequence[Sequence[Any]], order: random.Random,
) -> Mapping[str, Tensor]:  # fmt: skip
    """Judges calls of a schedule, and returns the results of one."""
    numbers = order.sample(range(len(schedule)), len(schedule))
    first = timed_results(process, numbers[:1])[0]
    size = sum(t.numel() * t.element_size() for t in first.values())
    numbers = numbers[: max(2, min(len(numbers), VERIFIED_BYTES // max(size, 1)))]
    until, seen = time.monotonic() + VERIFY_SECONDS, dict[tuple[int, int], Mapping[str, Tensor]]()
    for number, outputs in zip(numbers, timed_results(process, numbers), strict=True):
        which, _, salt = schedule[number]
        if (which, salt) in seen and _equal(seen[which, salt], outputs):
            continue
        if len(seen) >= VERIFY_LEAST and time.monotonic() > until:
            break
        seen[which, salt] = outputs
        _judge(examination, materials[which], salt, outputs, f"timed call {number + 1}")
    return first


def verify_chain(
    process: CandidateProcess, examination: Examination, materials: Sequence[Material], calls: int, salt: int,
    order: random.Random,
) -> None:  # fmt: skip
    """Judges calls of a chain, each with the inputs that the results of the call before it lead to."""
    numbers = order.sample(range(1, calls), min(CHAIN_VERIFIED, calls - 1))
    results = timed_results(process, [n for number in numbers for n in (number - 1, number)])
    for number, before, outputs in zip(numbers, results[::2], results[1::2], strict=True):
        its = next_salt(salt, number - 1, before)
        _judge(examination, materials[number % len(materials)], its, outputs, f"timed call {number + 1} of a chain")


def _judge(examination: Examination, given: Material, salt: int, outputs: Mapping[str, Tensor], label: str) -> None:
    run = CandidateRun(names=tuple(outputs), outputs=dict(outputs))
    inputs = varied(given.inputs, salt)
    material = replace(given, inputs=inputs, target=replace(given.target, backward=None))
    reference = decisions.with_undeclared(examination, run, examination.references(material, run))
    bad = values.judge(examination, run, reference, "values", label, noise=False, repeat=None)
    if bad:
        text = examination.findings[-1].text if examination.findings else f"{', '.join(sorted(bad))} is wrong"
        raise Impossible("call_count", f"{label} is wrong, and such inputs were right before: {text}")


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
