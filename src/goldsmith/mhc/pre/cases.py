"""Cases and benchmark sizes of mhc.pre."""

from __future__ import annotations

from .._cases import PRE_CASES, PRE_EVERY_PROBE, SEGMENTS, bench, build_cases, phi_bytes, pre_inputs

__all__ = ["BENCH", "CASES", "SEGMENTS"]

CASES = build_cases(pre_inputs, PRE_CASES, every_probe=PRE_EVERY_PROBE)

BENCH = bench(
    pre_inputs,
    forward=9,
    backward=14,
    fixed=phi_bytes,
    why="forward 18*dim bytes per token: x twice, h_in; backward 28*dim: x and grad_h_in twice, dx",
)
