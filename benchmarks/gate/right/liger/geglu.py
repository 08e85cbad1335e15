"""Right: Liger's GeGLU, whose backward writes over what it saved: only the forward is asked for."""

from liger_kernel.ops.geglu import LigerGELUMulFunction

PROBLEM = "liger_geglu"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x):
    gate, up = x.chunk(2, -1)
    return LigerGELUMulFunction.apply(gate.clone(), up.clone())
