"""Right: Liger's dynamic tanh, which asks the GPU for its multiprocessors and tunes itself."""

from liger_kernel.ops.dyt import LigerDyTFunction

PROBLEM = "liger_dyt"
STATUS = "accepted"
NEEDS = ("liger_kernel", "cuda")


def candidate(x, alpha, gamma, beta):
    return LigerDyTFunction.apply(x, alpha, gamma, beta)
