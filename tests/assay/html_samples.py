"""Reports made by hand: passing, failing, a reference at fault, a backend that cannot run, hostile names."""

import math
import random

from goldsmith.assay.html.view import Entry
from goldsmith.assay.results import ErrorMap, Finding, Location, Note, ProbeRun, Report, Row

STAGES = ["inv_rms", "h_mix", "h_pre", "h_post", "h_res_logits", "h_res", "h_in", "x.grad", "phi.grad", "bias.grad"]
ENVIRONMENT = {"machine": "Intel Xeon, 2 cores", "torch": "2.13.0", "triton": "3.6.0", "python": "3.11.2"}
PROBES = [
    ProbeRun("values", True, "", 1.2, 30),
    ProbeRun("second_call", True, "", 0.4, 6),
    ProbeRun("threads", False, "a CUDA kernel has no thread count", 0.0, 0),
]


def kind(tensor):
    return "grad" if tensor.endswith(".grad") else "output" if tensor == "h_in" else "stage"


def rows(cases, bad=(), seed=1):
    draw = random.Random(seed)
    made = []
    for case in cases:
        for run in ("values", "second_call", "layout:stride0(grad_h_in)"):
            for tensor in STAGES:
                over = 16.0 * draw.uniform(40, 90) if tensor in bad else 10 ** draw.uniform(-4.5, -0.6)
                made.append(
                    Row(
                        case, run, tensor, kind(tensor), "float32", (13, 4, 64), over * 1e-6, over, over / 3,
                        over * 1e-7, draw.gauss(0, 1), 0.2, 1.4, 3.0, "bad" if tensor in bad else "ok",
                    )
                )  # fmt: skip
    return made


def error_map(tensor="bias.grad", case="tokens[T=13,D=64]", height=24, width=48, bad=True, seed=3):
    draw = random.Random(seed)
    golden = [[draw.gauss(0, 1) for _ in range(width)] for _ in range(height)]
    off = [[1 if bad and 2 * width // 3 <= j and i % 3 else 0 for j in range(width)] for i in range(height)]
    candidate = [[g * (16 if o else 1) for g, o in zip(gs, os)] for gs, os in zip(golden, off)]
    error = [
        [abs(15 * g) * 300 if o else abs(draw.gauss(0, 0.1)) for g, o in zip(gs, os)] for gs, os in zip(golden, off)
    ]
    if bad:
        candidate[0][0], error[0][0] = math.nan, math.nan
    segments = {"pre": (0, width // 6), "post": (width // 6, 2 * width // 3), "res": (2 * width // 3, width)}
    return ErrorMap(tensor, case, (height, width), golden, candidate, error, segments, bad)


def passing(target="mhc.pre", cases=12, seed=1, maps=True):
    names = [f"tokens[T={t},D=64]" for t in range(cases)]
    return Report(
        target,
        rows=rows(names, seed=seed),
        notes=[Note("not_proven", "h_res", "aten.logsumexp has no rounding rule; the bound is open there", names[0])],
        probes=PROBES,
        maps={"h_in": error_map("h_in", names[-1], bad=False)} if maps else {},
        environment=ENVIRONMENT,
        seconds=4.2,
        cases=names,
        dtypes=["float32"],
        stages=STAGES,
    )


def failing(target="mhc.pre", cases=6):
    names = [f"tokens[T={t},D=64]" for t in range(cases)]
    where = Location(
        "bias.grad", ("res",), {"column": [(8, 23)]}, 0.667, "segment res, columns 8..23, 66.7 % of the elements"
    )
    findings = [
        Finding(
            "CERTAIN", "values", "bias.grad", where, 14.31, 1.9e-5,
            "bias.grad is wrong: every element of segment res is 16.000 times the reference", names[-1],
        ),
        Finding(
            "SYSTEMATIC", "slope", "bias.grad", where, 0.211, 0.08,
            "bias.grad has a slope of 0.21 against the reference, 41 standard errors from none", names[-1],
        ),
        Finding(
            "CERTAIN", "mutation", "phi", None, None, None,
            "the backward wrote over its input phi: 96 of 6144 bytes differ afterwards", names[-1],
        ),
    ]  # fmt: skip
    report = passing(target, cases)
    report.verdict, report.findings = "fail", findings
    report.rows = rows(names, bad=("bias.grad",))
    report.maps = {"bias.grad": error_map(case=names[-1])}
    return report


def reference_fault(target="mhc.head"):
    text = "the golden computes in float32: aten.rsqrt made it at head.py:12; the golden must stay in float64"
    return Report(
        target,
        "reference_fault",
        findings=[Finding("CERTAIN", "golden", "", None, None, None, text, "one_token float32")],
        probes=PROBES,
        environment=ENVIRONMENT,
        seconds=0.3,
        cases=["one_token float32"],
        dtypes=["float32"],
    )


EVIL = "<script>alert('x')</script>\"'&{{ 7*7 }}"
LONG = "a_kernel_whose_author_likes_to_say_everything_in_its_name_" * 3


def hostile():
    """Everything that a user names, named to break the page."""
    report = failing(LONG + EVIL)
    report.cases = [EVIL, LONG]
    report.rows = [r for case in report.cases for r in rows([case], bad=(EVIL,))]
    report.rows += [Row(EVIL, EVIL, EVIL, "output", EVIL, (3,), 9.0, 9.0, state="bad")]
    where = Location(EVIL, (EVIL,), {EVIL: [(0, 3)]}, 0.5, "")
    report.findings = [Finding("CERTAIN", EVIL, EVIL, where, 9.0, 1.0, f"{EVIL} is {LONG}", EVIL)]
    report.notes = [Note(EVIL, EVIL, EVIL, EVIL), Note("not_judged", LONG, LONG, LONG)]
    report.probes = [ProbeRun(EVIL, False, EVIL), ProbeRun(LONG, True, LONG)]
    report.maps = {EVIL: error_map(EVIL, EVIL)}
    report.stages = [EVIL, LONG]
    report.environment = {EVIL: EVIL, LONG: LONG}
    return report


def verify_entries():
    """What `goldsmith verify` hands over when everything that can happen has happened."""
    reason = "needs a CUDA device; the inputs are on cpu (TRITON_INTERPRET=1 runs it on the CPU)"
    partial = passing("mhc.sinkhorn on triton", 3)
    partial.partial = "interrupted after 3 of 9 cases"
    return [
        Entry("mhc.expand", "triton", None, reason),
        Entry("mhc.expand", "reference", passing("mhc.expand on reference", 9)),
        Entry("mhc.head", "reference", reference_fault("mhc.head on reference")),
        Entry("mhc.pre", "triton", failing("mhc.pre on triton"), how="interpreter"),
        Entry("mhc.pre", "reference", passing("mhc.pre on reference", 40)),
        Entry("mhc.sinkhorn", "triton", partial),
        Entry(LONG, "", hostile()),
    ]
