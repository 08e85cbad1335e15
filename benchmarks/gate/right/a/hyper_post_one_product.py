"""Right: the block's output becomes one more stream, so that one batched product does everything."""

import torch

PROBLEM = "a_hyper_post"
STATUS = "accepted"


def candidate(streams, out, mix, post):
    return torch.cat([mix, post[..., None]], -1) @ torch.cat([streams, out[:, None]], 1)
