"""The usual rules by name, for what must not import torch."""

RULES = ("assert_close", "allclose_1e-2", "twice_torch", "calc_diff_1e-3", "gradcheck", "opcheck")
