"""Right: Liger's second half of a hyper-connection."""

from liger_kernel.ops.mhc import LigerMHCPostResFunction

PROBLEM = "a_hyper_post"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(streams, out, mix, post):
    return LigerMHCPostResFunction.apply(streams, out, post, mix)
