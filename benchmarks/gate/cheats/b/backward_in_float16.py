"""Its forward is exact; its backward keeps x, the weights and the output gradient in float16."""

import torch

PROBLEM = "a_geglu"
STATUS = "cheating"
REASONS = {"lowered_precision", "backward_shortcut"}
ALSO = {"wrong"}


class Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        x, w_gate, w_up = given
        ctx.save_for_backward(*(t.half() for t in given))
        return torch.nn.functional.gelu(x @ w_gate) * (x @ w_up)

    @staticmethod
    def backward(ctx, grad_y):
        x, w_gate, w_up = (t.float().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.nn.functional.gelu(x @ w_gate) * (x @ w_up)
        return torch.autograd.grad(y, (x, w_gate, w_up), grad_y.half().float())


candidate = Geglu.apply
