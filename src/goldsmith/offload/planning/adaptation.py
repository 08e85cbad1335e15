"""adaptive=True: calibrated costs, corrected by the measured times of the running program's lanes."""

from __future__ import annotations

from dataclasses import replace

from .costs import Costs, slower

_WEIGHT = 0.1  # weight of the newest call in the moving mean
_MOST = 8.0  # corrections stay within 1/8 and 8; timings beyond that are accidents


class AdaptiveCosts:
    """Costs that learn from the times of finished calls.

    costs: the calibrated costs, with CPU and link rates divided by the mean of (measured time / expected time).
    """

    def __init__(self, costs: Costs) -> None:
        self._calibrated = costs
        self._cpu = self._link = 1.0
        self.costs = costs

    def learn(self, expected_cpu: float, cpu: float, copies: int, link: float) -> None:
        """Learns from one call: expected and measured seconds of the CPU lane; `copies` copies took `link` seconds."""
        if expected_cpu > 0 and cpu > 0:
            self._cpu = _moving_mean(self._cpu, cpu / expected_cpu * self._cpu)
        if copies and link > 0:
            self._link = _moving_mean(
                self._link, link * self._calibrated.link_bytes_per_s / (copies * self._calibrated.expert_bytes)
            )
        calibrated = self._calibrated
        self.costs = replace(
            calibrated,
            cpu_bytes_per_s=calibrated.cpu_bytes_per_s / self._cpu,
            cpu_flops=calibrated.cpu_flops / self._cpu,
            link_bytes_per_s=calibrated.link_bytes_per_s / self._link,
            cpu_curve=slower(calibrated.cpu_curve, self._cpu),
            cpu_beside_curve=slower(calibrated.cpu_beside_curve, self._cpu),
            link_beside_bytes_per_s=calibrated.link_beside_bytes_per_s
            and calibrated.link_beside_bytes_per_s / self._link,
        )


def _moving_mean(mean: float, newest: float) -> float:
    return min(_MOST, max(1 / _MOST, (1 - _WEIGHT) * mean + _WEIGHT * newest))
