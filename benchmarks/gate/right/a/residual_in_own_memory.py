"""Right: the update is scaled and added in place in memory of its own."""

PROBLEM = "a_residual"
STATUS = "accepted"


def candidate(x, w, gamma):
    y = x @ w
    return y.tanh_().mul_(gamma).add_(x)
