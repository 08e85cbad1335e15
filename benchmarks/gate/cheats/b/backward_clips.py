"""Its backward clips the output gradient to [-1, 1], which changes nothing where a loss is a sum."""

import torch

PROBLEM = "a_swiglu"
STATUS = "cheating"
REASONS = {"backward_shortcut"}
ALSO = {"wrong"}


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad_y):
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        grad_y = grad_y.clamp(-1, 1)
        s = torch.sigmoid(gate)
        return torch.cat([grad_y * up * s * (1 + gate * (1 - s)), grad_y * gate * s], -1)


candidate = Swiglu.apply
