"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed by (nearly) doubly stochastic matrices.

The mathematics is in README.md beside this file; each operator is a folder: what it is (op), what it means (reference),
how it is fast (_triton), on what it is tried (cases).
"""

from .boundary.op import boundary
from .coefficients.op import coefficients
from .connect_backward import op as _connect_backward  # noqa: F401  registers the operator
from .expand.op import expand
from .head.op import head
from .post.op import post
from .pre.op import pre
from .pre_backward.op import pre_backward
from .sinkhorn.op import sinkhorn

__all__ = ["boundary", "coefficients", "expand", "head", "post", "pre", "pre_backward", "sinkhorn"]
