"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed by (nearly) doubly stochastic matrices.

README.md in this folder has the mathematics. Each operator is a folder: declaration (op.py), plain torch
(reference.py), Triton (_triton.py) and test cases (cases.py).
"""

from .boundary.op import boundary
from .coefficients.op import coefficients
from .collapse.op import collapse
from .connect_backward import op as _connect_backward  # noqa: F401  the import registers the operator
from .convert import (
    from_hf,
    from_liger,
    from_megatron,
    from_te,
    streams_from_te,
    streams_to_te,
    to_hf,
    to_liger,
    to_megatron,
    to_te,
)
from .expand.op import expand
from .gated import GatedConnection, GatedHead
from .gated_pre.op import gated_pre
from .head.op import head
from .independent_pre.op import independent_pre
from .inject.op import inject
from .lagged_boundary.op import lagged_boundary
from .modules import HyperConnection, HyperHead
from .post.op import post
from .pre.op import pre
from .pre_gradient_formula.op import pre_backward
from .sinkhorn.op import sinkhorn
from .stack import HyperStack

__all__ = [
    "GatedConnection",
    "GatedHead",
    "HyperConnection",
    "HyperHead",
    "HyperStack",
    "boundary",
    "coefficients",
    "collapse",
    "expand",
    "from_hf",
    "from_liger",
    "from_megatron",
    "from_te",
    "gated_pre",
    "head",
    "independent_pre",
    "inject",
    "lagged_boundary",
    "post",
    "pre",
    "pre_backward",
    "sinkhorn",
    "streams_from_te",
    "streams_to_te",
    "to_hf",
    "to_liger",
    "to_megatron",
    "to_te",
]
