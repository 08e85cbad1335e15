"""Right: torch's foreach operators on lists with one tensor."""

import torch

PROBLEM = "a_momentum"
STATUS = "accepted"


def candidate(p, g, velocity, lr, mu):
    (velocity_new,) = torch._foreach_add([g], [velocity], alpha=mu)
    (step,) = torch._foreach_add([g], [velocity_new], alpha=mu)
    return torch._foreach_add([p], [step], alpha=-lr)[0], velocity_new
