"""Names of the usual rules, for modules that must not import torch."""

RULES = ("assert_close", "allclose_1e-2", "twice_torch", "calc_diff_1e-3", "gradcheck", "opcheck")
