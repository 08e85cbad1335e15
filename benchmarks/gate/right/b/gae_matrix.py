"""Right: the powers of discount * decay in a triangle, times the differences, in float64."""

import torch

PROBLEM = "a_gae"
STATUS = "accepted"


def candidate(reward, value, discount, decay):
    delta = reward + discount * value[1:] - value[:-1]
    t = torch.arange(len(delta))
    ahead = t - t[:, None]
    powers = torch.where(ahead >= 0, (discount * decay) ** ahead.clamp(min=0).double(), 0.0)
    return (powers @ delta.double()).to(reward.dtype)
