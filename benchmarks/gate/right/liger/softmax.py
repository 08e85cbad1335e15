"""Right: Liger's softmax."""

from liger_kernel.ops.softmax import LigerSoftmaxFunction

PROBLEM = "a_softmax"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x):
    return LigerSoftmaxFunction.apply(x)
