"""Right: FlashAttention in torch: tiles of keys, a running maximum, and a backward from the saved log-sum-exp."""

import torch

PROBLEM = "a_attention"
STATUS = "accepted"


TILE = 8


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        T, scale = q.shape[1], q.shape[2] ** -0.5
        position = torch.arange(T)
        top, total = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(*q.shape[:2], 1)
        y = torch.zeros_like(q)
        for start in range(0, T, TILE):
            keys = slice(start, start + TILE)
            later = position[:, None] < position[keys]
            scores = (q @ k[:, keys].mT * scale).masked_fill(later, -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            base = torch.where(new_top == -torch.inf, 0.0, new_top)
            p, shrink = torch.exp(scores - base), torch.exp(top - base)
            total = total * shrink + p.sum(-1, keepdim=True)
            y, top = y * shrink + p @ v[:, keys], new_top
        y = y / total
        ctx.save_for_backward(q, k, v, y, top + total.log())
        return y

    @staticmethod
    def backward(ctx, grad_y):
        q, k, v, y, lse = ctx.saved_tensors
        T, scale = q.shape[1], q.shape[2] ** -0.5
        position = torch.arange(T)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        inner = (grad_y * y).sum(-1, keepdim=True)
        for start in range(0, T, TILE):
            keys = slice(start, start + TILE)
            later = position[:, None] < position[keys]
            p = torch.exp((q @ k[:, keys].mT * scale).masked_fill(later, -torch.inf) - lse)
            dv[:, keys] = p.mT @ grad_y
            ds = p * (grad_y @ v[:, keys].mT - inner) * scale
            dq += ds @ k[:, keys]
            dk[:, keys] = ds.mT @ q
        return dq, dk, dv


candidate = Attention.apply
