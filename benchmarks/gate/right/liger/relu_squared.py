"""Right: Liger's squared ReLU."""

from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

PROBLEM = "liger_relu_squared"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x):
    return LigerReLUSquaredFunction.apply(x)
