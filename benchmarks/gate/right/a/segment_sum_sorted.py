"""Right: rows are sorted by segment, and each segment is one sum of a slice."""

import torch

PROBLEM = "a_segment_sum"
STATUS = "accepted"


class SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, segment, S):
        ctx.save_for_backward(segment)
        order = torch.argsort(segment, stable=True)
        ends = torch.bincount(segment, minlength=S).cumsum(0).tolist()
        rows = x[order]
        return torch.stack([rows[start:end].sum(0) for start, end in zip([0, *ends], ends)])

    @staticmethod
    def backward(ctx, grad_y):
        return grad_y[ctx.saved_tensors[0]], None, None


candidate = SegmentSum.apply
