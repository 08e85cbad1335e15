"""Right: a loop backwards in the forward, and a loop forwards in the backward."""

import torch
import torch.nn.functional as F

PROBLEM = "a_gae"
STATUS = "accepted"


class GAE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reward, value, discount, decay):
        ctx.rates = discount, decay
        a = reward + discount * value[1:] - value[:-1]
        for t in range(len(a) - 2, -1, -1):
            a[t] += discount * decay * a[t + 1]
        return a

    @staticmethod
    def backward(ctx, grad_a):
        discount, decay = ctx.rates
        delta = grad_a.clone()
        for t in range(1, len(delta)):
            delta[t] += discount * decay * delta[t - 1]
        d_value = F.pad(discount * delta, (0, 0, 1, 0)) - F.pad(delta, (0, 0, 0, 1))
        return delta, d_value, None, None


candidate = GAE.apply
