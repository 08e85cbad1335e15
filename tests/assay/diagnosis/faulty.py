"""Evidence of small wrong kernels, for the tests of the rules: real numbers from plain torch, or a real check."""

import torch

from assay import kernels
from goldsmith import assay
from goldsmith.assay.diagnosis.facts.evidence import Evidence
from goldsmith.assay.diagnosis.facts.patterns import patterns
from goldsmith.assay.diagnosis.facts.ratios import ratios
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import CERTAIN, FAIL, Finding


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def report(*texts, probe="values", verdict=FAIL, kind="", run="", values=None):
    more = {"kind": kind, "run": run, "values": values or {}}
    findings = [Finding(CERTAIN, probe, "y", None, None, None, text, **more) for text in texts]
    return Report("kernel", verdict=verdict, findings=findings)


def pair(got, golden, *, numbers=None, segments=None, tensor="y", **more):
    """Evidence of one tensor, with what ratios and patterns say of it."""
    got, golden = got.double(), golden.double()
    bound = 2.0**-21 * golden.abs() + 1e-7
    if "ratios" not in more and bool(torch.isfinite(got).all()):
        more["ratios"] = ratios(tensor, got, golden, bound=bound, numbers=numbers, segments=segments)
    if "permutations" not in more and bool(torch.isfinite(got).all()):
        others = {n: g for n, (_, g) in more.get("other", {}).items()}
        more["permutations"] = patterns(tensor, got, golden, bound=bound, others=others)
    more.setdefault("report", report(f"{tensor} exceeds the proven bound"))
    return Evidence(tensor=tensor, got=got, golden=golden, **more)


def checked(kernel, golden=kernels.weighted_sum, cases=kernels.rows, probes="default", **more):
    """Evidence that holds no more than what a check says."""
    target = kernels.target(kernel, golden, cases, **more)
    return Evidence(report=assay.check(target, raises=False, probes=probes), tensor="y")
