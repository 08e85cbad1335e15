"""Every wrong kernel and right twin, in the order of the files."""

from . import dense, mhc, rows, state, table  # noqa: F401  each registers its kernels when it is imported
from .registry import KERNELS

__all__ = ["KERNELS"]
