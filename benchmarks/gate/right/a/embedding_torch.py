"""Right: torch's embedding."""

import torch.nn.functional as F

PROBLEM = "a_embedding"
STATUS = "accepted"


def candidate(table, index):
    return F.embedding(index, table)
