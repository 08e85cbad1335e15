"""Floor 0: what an operator is, and what this machine can run. Imports torch alone."""

from .device import BackendUnavailable, Machine, machine
from .op import Backend, Op
from .shapes import ShapeError, check_shapes

__all__ = ["Backend", "BackendUnavailable", "Machine", "Op", "ShapeError", "check_shapes", "machine"]
