"""Generalised advantages: a[t] = r[t] + g v[t + 1] - v[t] + g l a[t + 1], backwards from the end."""

import torch

from goldsmith import assay


@assay.case(T=[19, 1], B=[4])
def steps(make, T, B):
    return {"reward": make.normal(T, B), "value": make.normal(T + 1, B), "discount": 0.97, "decay": 0.9}


cases = steps


def golden(reward, value, discount, decay):
    delta = reward + discount * value[1:] - value[:-1]
    advantage, rows = torch.zeros_like(delta[0]), []
    for t in reversed(range(len(delta))):
        advantage = delta[t] + discount * decay * advantage
        rows.append(advantage)
    return torch.stack(rows[::-1])
