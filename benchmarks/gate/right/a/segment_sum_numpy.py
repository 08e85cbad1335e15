"""Right: numpy's unbuffered add at repeated indices."""

import numpy as np
import torch

PROBLEM = "a_segment_sum"
STATUS = "accepted"


class SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, segment, S):
        ctx.save_for_backward(segment)
        y = np.zeros((S, x.shape[1]), dtype=np.float32)
        np.add.at(y, segment.numpy(), x.detach().numpy())
        return torch.from_numpy(y)

    @staticmethod
    def backward(ctx, grad_y):
        return grad_y[ctx.saved_tensors[0]], None, None


candidate = SegmentSum.apply
