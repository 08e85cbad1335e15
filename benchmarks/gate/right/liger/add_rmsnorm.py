"""Right: Liger's RMSNorm of a sum, which returns the sum as well."""

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

PROBLEM = "liger_add_rmsnorm"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x, residual, w, eps):
    return LigerFusedAddRMSNormFunction.apply(x, residual, w, eps)
