"""Cases and benchmark sizes of mhc.coefficients."""

from __future__ import annotations

from .._cases import PRE_CASES, PRE_EVERY_PROBE, SEGMENTS, bench, build_cases, phi_bytes, pre_inputs

__all__ = ["BENCH", "CASES", "SEGMENTS"]

CASES = build_cases(pre_inputs, PRE_CASES, every_probe=PRE_EVERY_PROBE)

BENCH = bench(
    pre_inputs,
    forward=4,
    backward=8,
    fixed=phi_bytes,
    why="forward 8*dim bytes per token: x; backward 16*dim: x, dx",
)
