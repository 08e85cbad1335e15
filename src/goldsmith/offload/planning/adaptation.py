"""adaptive=True: calibrated costs, corrected by the measured times of the running program's lanes."""

from __future__ import annotations

from dataclasses import replace

from .costs import Costs, slower

_WEIGHT = 0.1  # weight of the newest call in the moving mean
_MOST = 8.0  # corrections stay within 1/8 and 8; timings beyond that are accidents


class Adapting:
    """`costs`: the calibrated costs, with CPU and link rates divided by the mean of (measured time / expected time)."""

    def __init__(self, costs: Costs) -> None:
        self._given = costs
        self._cpu = self._link = 1.0
        self.costs = costs

    def learn(self, expected_cpu: float, cpu: float, copies: int, link: float) -> None:
        """Learns from one call: expected and measured seconds of the CPU lane; seconds that so many copies took."""
        if expected_cpu > 0 and cpu > 0:
            self._cpu = _moved(self._cpu, cpu / expected_cpu * self._cpu)
        if copies and link > 0:
            self._link = _moved(self._link, link * self._given.link_bytes_per_s / (copies * self._given.expert_bytes))
        given = self._given
        self.costs = replace(
            given,
            cpu_bytes_per_s=given.cpu_bytes_per_s / self._cpu,
            cpu_flops=given.cpu_flops / self._cpu,
            link_bytes_per_s=given.link_bytes_per_s / self._link,
            cpu_curve=slower(given.cpu_curve, self._cpu),
            cpu_beside_curve=slower(given.cpu_beside_curve, self._cpu),
            link_beside_bytes_per_s=given.link_beside_bytes_per_s and given.link_beside_bytes_per_s / self._link,
        )


def _moved(mean: float, newest: float) -> float:
    return min(_MOST, max(1 / _MOST, (1 - _WEIGHT) * mean + _WEIGHT * newest))
