"""Right: torch's own loss without a reduction."""

import torch.nn.functional as F

PROBLEM = "a_cross_entropy"
STATUS = "accepted"


def candidate(logits, label):
    return F.nll_loss(F.log_softmax(logits, -1), label, reduction="none")
