"""Right: the root comes from the C library through ctypes, one row at a time."""

import ctypes

import torch

PROBLEM = "a_rms_infer"
STATUS = "accepted"


_LIBM = ctypes.CDLL(None)
_LIBM.sqrt.restype, _LIBM.sqrt.argtypes = ctypes.c_double, [ctypes.c_double]


def candidate(x, w, eps):
    means = (x.double().square().sum(-1) / x.shape[1]).tolist()
    inv = torch.tensor([1 / _LIBM.sqrt(mean + eps) for mean in means], dtype=torch.float64)
    return (x.double() * inv[:, None] * w.double()).to(x.dtype)
