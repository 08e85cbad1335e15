"""Right: Liger's RMSNorm, which does not write its gradient over the output's here."""

from liger_kernel.ops.rms_norm import LigerRMSNormFunction

PROBLEM = "a_rmsnorm"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x, w, eps):
    return LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", False)
