"""Right: Liger's LayerNorm."""

from liger_kernel.ops.layer_norm import LigerLayerNormFunction

PROBLEM = "a_layernorm"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x, w, b, eps):
    return LigerLayerNormFunction.apply(x, w, b, eps)
