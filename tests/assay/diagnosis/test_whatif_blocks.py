"""Changed goldens: moments merged block by block, and one of several calls of a loop's line changed in every step."""

import pytest
import torch

from assay.diagnosis.targets import explain, session_of
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

BLOCK = 8


def best(target, tensor="y"):
    examination = session_of(target, ("values", "ensemble"))
    changes = explain(
        examination, tensor, dict(examination.first.outputs, **examination.first.grads)[tensor], examination.first
    )
    assert changes, f"nothing explains {tensor}"
    return changes[0]


@assay.case(T=[5], N=[29])
def rows(make, T, N):
    return {"x": make.normal(T, N)}


def moments(x, *, weighed=True, apart=True):
    """Variance by merging the blocks' means and squared deviations."""
    count, mean, spread = 0, torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for part in x.split(BLOCK, 1):
        n = part.shape[1] if weighed else BLOCK
        step = part.mean(1) - mean
        spread = spread + (part - part.mean(1, keepdim=True)).square().sum(1)
        spread = spread + step.square() * count * n / (count + n) * apart
        mean, count = mean + step * n / (count + n), count + n
    return mean, spread / x.shape[1]


@pytest.mark.parametrize(
    "merged, which, cause, text",
    [
        (
            {"weighed": False},
            0,
            "wrong_factor",
            "all blocks have the same weight, although the last one is shorter",
        ),
        ({"apart": False}, 1, "missing_term", "without the terms between blocks"),
    ],
)
def test_wrongly_merged_blocks_are_explained(merged, which, cause, text):
    goldens = (lambda x: x.mean(1), lambda x: (x - x.mean(1, keepdim=True)).square().mean(1))
    change = best(assay.Target(lambda x: moments(x, **merged)[which], goldens[which], cases=rows))
    assert (change.cause, change.exact) == (cause, True) and text in change.text


def test_correct_moments_pass():
    golden = assay.Target(lambda x: moments(x)[1], lambda x: (x - x.mean(1, keepdim=True)).square().mean(1), cases=rows)
    assert assay.check(golden, raises=False).ok


@assay.case(T=[6], H=[5])
def steps(make, T, H):
    return {"r": make.normal(T, H), "z": make.normal(T, H), "h": make.normal(H)}


def gated(r, z, h, *, share=lambda z: z):
    out = []
    for a, b in zip(r, z, strict=True):
        forget, keep = torch.exp(-a * a), torch.exp(-b * b)
        keep = share(keep)
        h = (1 - keep) * torch.tanh(forget * h) + keep * h
        out.append(h)
    return torch.stack(out)


# running sums


def joined(parts):
    return torch.cat(parts, 1) if parts else None
