"""Right: Liger's rotary embedding, which turns its inputs in place: here copies."""

import torch
from liger_kernel.ops.rope import LigerRopeFunction

PROBLEM = "liger_rope"
STATUS = "accepted"
NEEDS = ("liger_kernel",)


def candidate(x, cos, sin):
    q = x[None].transpose(1, 2).clone()
    k = q[:, :1].detach().clone()
    turned, _ = LigerRopeFunction.apply(q, k, torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None])
    return turned.transpose(1, 2)[0]
