"""timed_calls: the clock around each call, in the candidate's process. What it reports is checked by the judge's clock.

Each call gets numbers that no other call gets, in fresh memory. `run` overwrites the caches between the inputs and the
call, which leaves a thread of the candidate time to compute the result before the clock starts. In `chain` there is no
such time: the inputs of each call depend on the result of the call before. The judge holds the two against each other.
The functions of the clock are bound when this module is imported, which is before any candidate is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...declare.returned_values import names_of, only_tensors
from ...execute.records import Material

CPU_FLUSH, CUDA_FLUSH = 64 << 20, 256 << 20  # bytes: more than the last cache of most machines
SLEEP_CYCLES = 2_000_000  # a millisecond: the stream waits until the host has queued the call
WALL, DEVICE = "wall", "device"
VARIED = 32
_now = time.perf_counter_ns
_synchronize = torch.cuda.synchronize
_event = torch.cuda.Event


def varied(inputs: Mapping[str, Tensor], salt: int) -> dict[str, Tensor]:
    """Copies whose floating-point numbers are smaller by up to a part in VARIED, others for each salt; 0: unchanged.

    They shrink, so that a number of [0, 1) stays there. Numbers of 8 bits stay mostly what they are.
    """
    if not salt:
        return {n: t.detach().clone() for n, t in inputs.items()}
    copies = {}
    for at, (name, t) in enumerate(inputs.items()):
        copies[name] = t.detach().clone()
        if t.is_floating_point():
            generator = torch.Generator(t.device).manual_seed(salt * 64 + at)
            wide = torch.promote_types(t.dtype, torch.float32) if t.dtype.itemsize > 1 else torch.float32
            factor = 1 - torch.rand(t.shape, generator=generator, device=t.device, dtype=wide) / VARIED
            copies[name].copy_(factor.mul_(t.detach().to(wide)))
    return copies


def next_salt(salt: int, number: int, results: Mapping[str, Tensor]) -> int:
    """The salt of the call after call `number` of a chain: unknown before all bytes of its results are there.

    salt: of the first call; 0: that of all.
    """
    if not salt:
        return 0
    total = salt + number
    for t in results.values():
        flat = t.detach().reshape(-1).contiguous().view(torch.uint8)
        whole = flat.numel() // 8 * 8
        total += int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
    return total * 2_654_435_761 % (2**31 - 2) + 1  # neighbours get numbers far apart


class TimedCalls:
    """The calls of one candidate on some inputs; the results stay here until the judge asks for some of them."""

    def __init__(self) -> None:
        self.results: list[dict[str, Tensor]] = []
        self.flush: Tensor | None = None

    def run(
        self, call: Callable[[Mapping[str, Any]], Any], materials: Sequence[Material], schedule: Sequence[Any],
        *, further: bool = False,
    ) -> Any:  # fmt: skip
        """[microseconds, microseconds of work left afterwards] of each call of the schedule, a list of [number of the
        inputs, WALL or DEVICE, salt]. WALL: from an idle device to an idle device. DEVICE: between events.
        The caches are overwritten before each call. further: earlier results stay.
        """
        device = materials[0].device
        cuda = device.type == "cuda"
        if self.flush is None:
            self.flush = torch.zeros(CUDA_FLUSH if cuda else CPU_FLUSH, dtype=torch.int8, device=device)
        self.results, times = self.results if further else [], []
        with torch.no_grad():
            for which, kind, salt in schedule:
                material = materials[which]
                supply = material.ordered(varied(material.inputs, salt))
                self.flush.add_(1)
                if cuda:
                    taken, result = _on_stream(call, supply, device, kind)
                else:
                    began = _now()
                    result = call(supply)
                    taken = [(_now() - began) / 1e3, 0.0]
                self._keep(result, material)
                times.append(taken)
                del supply, result
        return times

    def chain(
        self, call: Callable[[Mapping[str, Any]], Any], materials: Sequence[Material], calls: int, salt: int
    ) -> list[list[float]]:
        """Calls without a flush, with the inputs in turn and a salt from each result for the next. The judge times them
        all together."""
        device, self.results, following = materials[0].device, [], salt
        with torch.no_grad():
            for number in range(calls):
                material = materials[number % len(materials)]
                supply = material.ordered(varied(material.inputs, following))
                result = call(supply)
                if device.type == "cuda":
                    _synchronize(device)
                self._keep(result, material)
                following = next_salt(salt, number, self.results[-1])
                del supply, result
        return []

    def _keep(self, result: object, material: Material) -> None:
        pairs = names_of(result, material.target.outputs, "candidate")
        self.results.append({n: t.detach().clone() for n, t in only_tensors(pairs, "candidate").items()})

    def some(self, which: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self.results[number] for number in which]


def _on_stream(
    call: Callable[[Mapping[str, object]], object], supply: Mapping[str, object], device: torch.device, kind: str
) -> tuple[list[float], object]:
    start, end = _event(enable_timing=True), _event(enable_timing=True)
    _synchronize(device)
    if kind == DEVICE:
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        result = call(supply)
        end.record()
        end.synchronize()
        began = _now()
        _synchronize(device)  # other streams
        return [start.elapsed_time(end) * 1e3, (_now() - began) / 1e3], result
    began = _now()
    result = call(supply)
    _synchronize(device)
    return [(_now() - began) / 1e3, 0.0], result
