"""Right: tiles of eight columns in the forward; the backward recomputes both products."""

import torch

PROBLEM = "a_geglu"
STATUS = "accepted"


def _tiles(x, w_gate, w_up):
    for start in range(0, w_gate.shape[1], 8):
        tile = slice(start, start + 8)
        yield tile, x @ w_gate[:, tile], x @ w_up[:, tile]


class GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_gate, w_up):
        y = x.new_empty(len(x), w_gate.shape[1])
        for tile, gate, up in _tiles(x, w_gate, w_up):
            y[:, tile] = 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up
        ctx.save_for_backward(x, w_gate, w_up)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, w_gate, w_up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(grad_y), torch.empty_like(grad_y)
        for tile, gate, up in _tiles(x, w_gate, w_up):
            below = 0.5 * (1 + torch.erf(gate * 0.5**0.5))
            density = torch.exp(-0.5 * gate * gate) * (2 * torch.pi) ** -0.5
            d_gate[:, tile] = grad_y[:, tile] * up * (below + gate * density)
            d_up[:, tile] = grad_y[:, tile] * gate * below
        return d_gate @ w_gate.T + d_up @ w_up.T, x.T @ d_gate, x.T @ d_up


candidate = GeGLU.apply
