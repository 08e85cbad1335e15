"""Right: three strided views are added and divided once."""

PROBLEM = "a_pool"
STATUS = "accepted"


def candidate(x):
    windows = (x.shape[-1] - 3) // 2 + 1
    return sum(x[:, i : i + 2 * windows - 1 : 2] for i in range(3)) / 3
