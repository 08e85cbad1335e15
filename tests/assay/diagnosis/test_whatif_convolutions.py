"""Changed goldens: convolutions as loops over their taps, forward and backward."""

import pytest
import torch
from torch.nn import functional as F

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.whatif import explain

pytestmark = pytest.mark.sweep(5)

TAPS = [(i, j) for i in range(3) for j in range(3)]


@assay.case(N=[3], C=[3], S=[6])
def images(make, N, C, S):
    return {"x": make.normal(N, C, S, S), "w": make.normal(4, C, 3, 3), "b": make.normal(4)}


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, fault):
        wide, size = F.pad(x, (1, 1, 1, 1)), x.shape[-1]
        ctx.save_for_backward(wide, w)
        ctx.fault = fault
        y = b[:, None, None].expand(len(x), -1, size, size).clone()
        for i, j in TAPS[:-1] if fault == "a tap short" else TAPS:
            tap = w[:, :, 2 - i, 2 - j] if fault == "reversed" else w[:, :, i, j]
            y += torch.einsum("ncij,oc->noij", wide[:, :, i : i + size, j : j + size], tap)
        return y

    @staticmethod
    def backward(ctx, dy):
        wide, w = ctx.saved_tensors
        size, dx, dw = dy.shape[-1], torch.zeros_like(wide), torch.zeros_like(w)
        for i, j in TAPS:
            part = torch.einsum("noij,oc->ncij", dy, w[:, :, i, j])
            place = dx[:, :, i : i + size, j : j + size]
            place.copy_(part if ctx.fault == "stored" else place + part)
            dw[:, :, i, j] = torch.einsum("ncij,noij->oc", wide[:, :, i : i + size, j : j + size], dy)
        db = dy[:1].sum((0, 2, 3)) if ctx.fault == "one image" else dy.sum((0, 2, 3))
        return dx[:, :, 1:-1, 1:-1], dw, db, None


def target(fault):
    return assay.Target(
        lambda x, w, b: Convolution.apply(x, w, b, fault), lambda x, w, b: F.conv2d(x, w, b, padding=1), cases=images
    )


@pytest.mark.parametrize(
    "fault, tensor, cause",
    [
        ("a tap short", "y", "off_by_one"),
        ("reversed", "y", "permuted"),
        ("stored", "x.grad", "overwritten_accumulator"),
        ("one image", "b.grad", "truncated_reduction"),
    ],
)
def test_a_mistake_in_a_loop_over_taps_or_images_is_explained(fault, tensor, cause):
    examination = session_of(target(fault), ("values", "ensemble"))
    got = dict(examination.first.outputs, **examination.first.grads)[tensor]
    changes = explain(examination, tensor, got, examination.first)
    assert (changes[0].cause, changes[0].exact) == (cause, True)


def test_the_correct_kernel_passes():
    assert assay.check(target(""), raises=False).ok
