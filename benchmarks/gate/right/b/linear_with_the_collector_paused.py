"""Right: turns the garbage collector off while it works and on again afterwards, as timers and servers do."""

import gc

PROBLEM = "a_linear"
STATUS = "accepted"


def candidate(x, w, b):
    was = gc.isenabled()
    gc.disable()
    try:
        y = b.repeat(len(x), 1)
        for k in range(0, x.shape[1], 32):
            y.addmm_(x[:, k : k + 32], w[k : k + 32])
        return y
    finally:
        if was:
            gc.enable()
