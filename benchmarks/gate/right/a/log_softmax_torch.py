"""Right: torch's own log_softmax, which a problem allows unless it asks for a kernel."""

import torch.nn.functional as F

PROBLEM = "a_log_softmax"
STATUS = "accepted"


def candidate(x):
    return F.log_softmax(x, dim=-1)
