"""Right: counts its calls and warns once; the count changes no number."""

import itertools
import warnings

PROBLEM = "a_rms_infer"
STATUS = "accepted"


_calls = itertools.count()


def candidate(x, w, eps):
    if next(_calls) == 0:
        warnings.warn("the first call builds its tables", stacklevel=2)
    inv = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return inv * x * w
