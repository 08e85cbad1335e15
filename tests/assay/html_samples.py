"""Reports made by hand: passing, failing, a reference at fault, a backend that cannot run, hostile names."""

import dataclasses
import math
import random
from pathlib import Path

import torch

from goldsmith.assay.diagnosis import Cause, Diagnosis
from goldsmith.assay.diagnosis.facts.evidence import (
    ErrorPattern,
    Evidence,
    Influence,
    MemoryFact,
    Ratio,
    RunFact,
    StageState,
    WhatIf,
)
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.html.view import Entry
from goldsmith.assay.report.results import (
    ErrorMap,
    Finding,
    Location,
    Note,
    ProbeRun,
    Row,
)

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
    result = []
    for case in cases:
        for run in ("values", "second_call", "layout:stride0(grad_h_in)"):
            for tensor in STAGES:
                over = 16.0 * draw.uniform(40, 90) if tensor in bad else 10 ** draw.uniform(-4.5, -0.6)
                result.append(
                    Row(
                        case, run, tensor, kind(tensor), "float32", (13, 4, 64), over * 1e-6, over, over / 3,
                        over * 1e-7, draw.gauss(0, 1), 0.2, 1.4, 3.0, "bad" if tensor in bad else "ok",
                    )
                )  # fmt: skip
    return result


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
    text = "the golden computes in float32: aten.rsqrt at head.py:12; the golden must stay in float64"
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


EVIL = "<script>alert('x')</script>\"'&{{ 7777*7777 }}"
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


# diagnoses

SCALAR = "a_res"


def diagnosis(name="mhc.pre", **more):
    """A gradient that carries an extra factor in its last segment, behind two stages that are right."""
    golden = torch.tensor([[math.sin(1 + 3 * i + j) for j in range(24)] for i in range(4)], dtype=torch.float64)
    got = golden.clone()
    got[:, 8:] *= 1.7
    evidence = Evidence(
        Report(name, "fail"),
        tensor="bias.grad",
        golden=golden,
        got=got,
        ratios=[Ratio("bias.grad", "segment", "res", 1.7, 1e-7, SCALAR)],
        permutations=[ErrorPattern("bias.grad", "shifted", 0.2, {"axis": 1, "step": 1})],
        runs={
            **{f"repeat {k}": RunFact(f"repeat {k}", ("bias.grad",)) for k in range(1, 11)},
            "layout stride0": RunFact("layout stride0", (), False, 2e-7),
            "backward twice": RunFact("backward twice", error="RuntimeError: freed"),
        },
        influence={
            "phi[1]": Influence("phi", 1, missing=((32, 63),), extra=((0, 1),), outputs=("bias.grad",)),
            "gamma[0]": Influence("gamma", 0, outputs=("bias.grad",), none=True),
        },
        whatif=[WhatIf("wrong_factor", "when h.grad is multiplied by a_res", "bias.grad", 1.0, True, others=0.75)],
        memory=[MemoryFact("overrun", "scratch", "64 bytes past the end: exactly 2x the buffer")],
        left_out={"shrink": "RuntimeError: no memory"},
        dtype="float32",
    )
    case = {"name": "tokens[T=1,D=64]", "dtype": "float32", "device": "cpu", "seed": 0, "threads": 1}
    case |= {"sizes": {"T": 1, "D": 64}, "steps": ["T: 13 -> 1"], "strides": {"phi": [64, 1]}}
    result = Diagnosis(
        "fail",
        failing(name),
        "bias.grad",
        Location("bias.grad", ("res",), {}, 0.667, "segment res; 64 of 96 elements (66.7 %)"),
        error_map(),
        [
            Cause("wrong_factor", 0.9, "bias.grad", [f"y / g is 1.7 = {SCALAR} in res"], {"ratio": 1.7, "where": "res"},
                  "bias.grad is wrong: a factor is wrong", "check where the factor is applied"),
            Cause("absolute_eps", 0.2, "bias.grad", ["scale 2^-12: bias.grad wrong"], {}, "an epsilon is absolute", ""),
        ],
        [
            StageState("inv_rms", "stage", 0.2, 0.1, "ok"),
            StageState("h_mix", "stage", None, None, "not judged", "the candidate does not name it"),
            StageState("h_in", "output", 44.0, None, "observed"),
            StageState("bias.grad", "grad", 3.3e6, 3.3e6, "culprit", "wrong on the golden's inputs"),
            StageState("x.grad", "grad", 2.0e5, 0.1, "inherited"),
        ],
        ["h_mix"],
        ["bias.grad is wrong with grad_h_in alone, and right with grad_h_post alone."],
        undecided=["a missing n / 4 cannot be told from a_res; try n = 8"],
        case=case,
        examined={
            **case, "name": "tokens[T=13,D=64]", "sizes": {"T": 4, "D": 24},
            "shapes": {"phi": [24, 64], "gamma": [128]},
        },
        seconds=2.5,
        evidence=evidence,
    )  # fmt: skip
    return dataclasses.replace(result, **more)


def hostile_diagnosis():
    """Every name and sentence, named to break the page."""
    result = diagnosis(EVIL + LONG, report=hostile(), first_wrong_stage=EVIL, suspects=[EVIL], undecided=[LONG, EVIL])
    result.location = Location(EVIL, (EVIL,), {}, 0.5, EVIL)
    result.map = error_map(EVIL, EVIL)
    result.causes = [Cause(EVIL, 0.5, EVIL, [EVIL, LONG], {EVIL: EVIL}, EVIL, LONG)]
    result.stages = [StageState(EVIL, EVIL, 1.0, 2.0, "culprit", EVIL), StageState(LONG, LONG)]
    result.case = {**result.case, "name": EVIL, "steps": [EVIL], "strides": {EVIL: [1]}, "layouts": {LONG: EVIL}}
    result.bundle, result.partial, result.traced = Path(LONG), EVIL, [EVIL, LONG]
    evidence = result.evidence
    evidence.ratios = [Ratio(EVIL, EVIL, EVIL, 1.0, 0.1, EVIL, (LONG,))]
    evidence.permutations = [ErrorPattern(EVIL, EVIL, 1.0, {EVIL: LONG}, (EVIL,), EVIL)]
    evidence.runs = {EVIL: RunFact(EVIL, (EVIL,), error=LONG)}
    evidence.influence = {EVIL: Influence(EVIL, 0, ((1, 2),), (), (LONG,))}
    evidence.whatif = [WhatIf(EVIL, LONG, EVIL, 0.5, False)]
    evidence.memory, evidence.left_out = [MemoryFact(EVIL, LONG, EVIL)], {EVIL: LONG}
    return result
