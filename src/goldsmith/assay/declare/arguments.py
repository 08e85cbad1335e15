"""Validation of the arguments of `check` and `diagnose`, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ...core.tracing import TargetError
from ..support.output_folder import unwritable
from .case import Case
from .target import UNIT, Target, listed, outside_of_transforms

DEVICES = ("cpu", "cuda")


def check_arguments(
    caller: str,
    target: object,
    case: object,
    dtype: object,
    device: object,
    seed: object,
    probes: object,
    budget_s: object,
) -> None:
    """TypeError for a wrong kind of object, TargetError for a wrong value; both name the argument."""
    if not isinstance(target, Target):
        raise TypeError(f"{caller}: expected an assay.Target, got {type(target).__name__}")
    outside_of_transforms(caller)
    cast = [kind for kind in DEVICES if torch.is_autocast_enabled(kind)]
    if cast:
        raise TargetError(
            f"{caller}: called under autocast ({cast[0]}), which would change the candidate's arithmetic but not the "
            "golden's; use autocast inside the candidate"
        )
    if case is not None and not isinstance(case, Case | str):
        raise TypeError(f"case: expected a Case, its name or None for all, got {type(case).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch dtype or None, got {dtype!r}")
    if dtype is not None and dtype not in UNIT:
        raise TargetError(f"dtype: {dtype} cannot be judged; use one of: {listed(UNIT)}")
    check_seed(seed)
    if not isinstance(probes, str) and not (
        isinstance(probes, Sequence | set | frozenset) and all(isinstance(p, str) for p in probes)
    ):
        raise TypeError(
            f"probes: expected the name of a level, or a list of names of levels and probes, got {probes!r}"
        )
    if budget_s is not None and (isinstance(budget_s, bool) or not isinstance(budget_s, int | float)):
        raise TypeError(f"budget_s: expected a positive number of seconds or None, got {budget_s!r}")
    if budget_s is not None and not budget_s > 0:
        raise TargetError(f"budget_s: expected a positive number of seconds or None, got {budget_s}")
    check_device(device)


def check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected a whole number, got {seed!r}")
    if not -(2**62) < seed < 2**62:
        raise TargetError(f"seed: expected a number of at most 62 bits, got {seed}")


def check_folder(argument: str, path: object) -> None:
    """Raises before the work starts if a folder cannot be written; it creates none."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument}: expected a folder's path or None, got {path!r}")
    if not str(path):
        raise TargetError(f"{argument}: expected a folder's path or None, got ''")
    why = unwritable(Path(path))
    if why:
        raise TargetError(f"{argument}: {str(path)!r} cannot be written: {why}")


def check_device(wanted: object) -> None:
    """TypeError or TargetError for a device on which no candidate can run here."""
    if not isinstance(wanted, str | torch.device):
        raise TypeError(f"device: expected cpu, cuda or cuda:1, got {wanted!r}")
    kind, _, index = str(wanted).partition(":")
    if kind not in DEVICES or (index and not index.isdigit()):
        raise TargetError(f"device: candidates cannot run on {str(wanted)!r}; use cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"device: {wanted}: this machine has no CUDA device that torch can use; use device='cpu'")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise TargetError(f"device: {wanted}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
