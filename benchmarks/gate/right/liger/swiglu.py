"""Right: Liger's SwiGLU, whose backward writes over what it saved: only the forward is asked for."""

from liger_kernel.ops.swiglu import LigerSiLUMulFunction

PROBLEM = "liger_swiglu"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x):
    gate, up = x.chunk(2, -1)
    return LigerSiLUMulFunction.apply(gate.clone(), up.clone())
