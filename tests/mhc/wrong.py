"""Helpers for the tests of wrong kernels: the check, and the tensors that it blames."""

import torch

from goldsmith import assay
from goldsmith.cli.verify.select import USUAL


def check(target, **options):
    """The assay's check without the expensive probes, which none of these bugs needs."""
    return assay.check(target, probes=USUAL, **options)


def wrong_segments(target):
    """{tensor: its wrong segments} from a check; a saved result goes by its own name."""
    report = check(target, raises=False)
    assert report.verdict == "fail", str(report)
    by_tensor = {}
    for finding in report.findings:
        segments = finding.location.segments if finding.location else ()
        by_tensor.setdefault(finding.tensor.removeprefix("saved."), set()).update(segments)
    return by_tensor


def spread(alpha, n):
    """alpha repeated to one value per mix."""
    return torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])


def through_fixed_point(p, g):
    """dL = P * (g - r 1^T - 1 c^T), with r and c such that the rows and columns of dL sum to 0."""
    n = p.shape[-1]
    gp = g * p
    system = torch.zeros(len(p), 2 * n, 2 * n, dtype=p.dtype)
    system[:, :n, :n], system[:, n:, n:] = torch.diag_embed(p.sum(-1)), torch.diag_embed(p.sum(-2))
    system[:, :n, n:], system[:, n:, :n] = p, p.mT
    known = torch.cat([gp.sum(-1), gp.sum(-2)], -1)
    solved = (torch.linalg.pinv(system) @ known.unsqueeze(-1)).squeeze(-1)
    return p * (g - solved[:, :n, None] - solved[:, None, n:])


def equal(a, b):
    """Whether a and b have the same bits, dtype and shape."""
    return a.dtype == b.dtype and torch.equal(a, b)
