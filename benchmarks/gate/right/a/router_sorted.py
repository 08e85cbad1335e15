"""Right: sorts all scores; among equal scores, which a tie allows, it takes the last expert."""

import torch

PROBLEM = "a_router"
STATUS = "accepted"


def candidate(scores, k):
    index = scores.shape[1] - 1 - torch.argsort(scores.flip(1), dim=1, descending=True, stable=True)[:, :k]
    return torch.softmax(scores.gather(1, index), -1), index
