"""Checks Liger-Kernel's hyper-connections and SwiGLU with the assay, declared as a user would declare them.

    python examples/assay_liger.py                    # no GPU: through Triton's interpreter, at small sizes
    python examples/assay_liger.py --device cuda      # on the GPU, also at real sizes and in bfloat16
    python examples/assay_liger.py --html liger.html --json liger.json --only post_res

Needs liger-kernel (docs/liger.md reports on 0.8.5). The file has goldens in plain torch, cases, targets, three faults
that are put into a copy of Liger's mhc.py and that a check must find, and, for a GPU, an edit that removes a rounding.
Exit status 0 where every verdict is the expected one.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import torch

from goldsmith import assay
from goldsmith.assay import stage

N = 4  # streams
M = N * (N + 2)  # coefficients of a token: pre, post, res

# ---- goldens


def pre_golden(x, h_pre):
    """sum_i h_pre[i] x[i]"""
    return (h_pre.unsqueeze(-1) * x).sum(-2)


def post_res_golden(x, f, h_post, h_res):
    """y[o] = sum_i h_res[o, i] x[i] + h_post[o] f"""
    mixed = h_res.unsqueeze(-1) * x.unsqueeze(-3)
    injected = h_post.unsqueeze(-1) * f.unsqueeze(-2)
    # one sum, because a kernel may add the five terms in any order: mixed.sum(-2) + injected would fix the last one,
    # and the bound for that order was exceeded by 5 % in 1 of 1.5 million elements on an H100
    return torch.cat([mixed, injected.unsqueeze(-2)], -2).sum(-2)


def coefficients_golden(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult):
    flat = x.flatten(-2)
    inv_rms = stage("inv_rms", torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps))
    mix = stage("mix", (flat @ phi) * inv_rms)
    pre, post, res = mix.split((N, N, N * N), -1)
    b_pre, b_post, b_res = b.split((N, N, N * N))
    h_pre = torch.sigmoid(alpha_pre * pre + b_pre) + pre_eps
    h_post = post_mult * torch.sigmoid(alpha_post * post + b_post)
    logits = stage("logits", (alpha_res * res + b_res).unflatten(-1, (N, N)))
    p = torch.softmax(logits, -1) + sinkhorn_eps
    p = p / (p.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        p = p / (p.sum(-1, keepdim=True) + sinkhorn_eps)
        p = p / (p.sum(-2, keepdim=True) + sinkhorn_eps)
    return h_pre, h_post, p


def swiglu_golden(a, b):
    """silu(a) b"""
    return a * torch.sigmoid(a) * b


# ---- cases


def draw_pre(make, T, C):
    return {"x": make.normal(T, N, C), "h_pre": make.uniform(T, N, dtype=torch.float32)}


def draw_post_res(make, T, C):
    h_post, h_res = make.uniform(T, N, dtype=torch.float32), make.uniform(T, N, N, dtype=torch.float32)
    return {"x": make.normal(T, N, C), "f": make.normal(T, C), "h_post": h_post, "h_res": h_res}


def draw_coefficients(make, T, C, iterations):
    tensors = {"x": make.normal(T, N, C), "phi": make.normal(N * C, M, std=(N * C) ** -0.5)}
    tensors["b"] = make.normal(M, dtype=torch.float32)
    tensors |= {f"alpha_{part}": make.uniform(dtype=torch.float32) for part in ("pre", "post", "res")}
    return tensors | {"tmax": iterations, "rms_eps": 1e-6, "pre_eps": 1e-6, "sinkhorn_eps": 1e-6, "post_mult": 2.0}


def draw_swiglu(make, T, C):
    return {"a": make.normal(T, C), "b": make.normal(T, C)}


# ---- targets


def targets(mhc: ModuleType, swiglu: ModuleType, device: str) -> dict[str, assay.Target]:
    """Targets of Liger's functions, from these modules (Liger's own or edited copies), with the goldens above."""

    def coefficients(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult):
        options = (True, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)  # allow_fp32 comes first
        return mhc.LigerMHCCoeffsFunction.apply(x, phi, b, alpha_pre, alpha_post, alpha_res, *options)

    gpu = device.startswith("cuda")
    sizes = {"T": [0, 1, 13, 300], "C": [40, 1280]} if gpu else {"T": [0, 5], "C": [40, 100]}
    # in the interpreter each half-step of Sinkhorn takes a millisecond per token, so there are fewer, and one width
    # (its 400 columns are two blocks of Liger's 256, the second not full)
    mixing = {**sizes, "iterations": 20} if gpu else {"T": [0, 5], "C": [100], "iterations": 5}
    dtypes = (torch.float32, torch.bfloat16) if gpu else (torch.float32,)
    parts = {"pre": (0, N), "post": (N, 2 * N), "res": (2 * N, M)}

    def target(name, candidate, golden, draw, **options):
        cases = assay.case(**(mixing if name == "coefficients" else sizes))(draw)
        return assay.Target(candidate, golden, cases=cases, name=f"liger.{name}", dtypes=dtypes, **options)

    return {
        "pre": target("pre", lambda x, h_pre: mhc.LigerMHCPreFunction.apply(x, h_pre), pre_golden, draw_pre),
        "post_res": target(
            "post_res",
            lambda x, f, h_post, h_res: mhc.LigerMHCPostResFunction.apply(x, f, h_post, h_res),
            post_res_golden,
            draw_post_res,
        ),
        "coefficients": target(
            "coefficients",
            coefficients,
            coefficients_golden,
            draw_coefficients,
            outputs=("h_pre", "h_post", "h_res"),
            segments={"b.grad": parts, "phi.grad": parts},
            dot="tf32" if gpu else "ieee",  # Liger lets Triton take tf32 for float32 operands
        ),
        "swiglu": target("swiglu", lambda a, b: swiglu.LigerSiLUMulFunction.apply(a, b), swiglu_golden, draw_swiglu),
    }


# ---- edits of a copy

# name -> (target that must fail, text in Liger's mhc.py, its replacement)
FAULTS = {
    "addend_dropped": ("coefficients", "gx = acc + x_f * factor[:, None]", "gx = acc"),
    "narrowed_block": (
        "post_res",
        "    grid = (triton.cdiv(N, block_n), triton.cdiv(C, block_c))\n    _mhc_post_res_bwd_kernel",
        "    grid = (triton.cdiv(N, block_n), C // block_c)\n    _mhc_post_res_bwd_kernel",
    ),
    "mask_removed": (
        "coefficients",
        "k_offs[None, :] * stride_xk,\n            mask=(n_offs[:, None] < N) & (k_offs[None, :] < K),",
        "k_offs[None, :] * stride_xk,\n            mask=(n_offs[:, None] < N),",
    ),
}

# the loss of Liger's coefficients in bfloat16: a gradient is rounded to phi's dtype before the product
MENDS = {
    "gradient_not_rounded": (
        "coefficients",
        """            grad_z = (grad_mix * invr[:, None]).to(phi.dtype)

        acc += tl.dot(grad_z, tl.trans(phi))

        dphi = tl.dot(tl.trans(x), grad_z)
""",
        """            grad_z = grad_mix * invr[:, None]

        acc += tl.dot(grad_z, tl.trans(phi.to(tl.float32)))

        dphi = tl.dot(tl.trans(x.to(tl.float32)), grad_z)
""",
    ),
}


def edited(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """A copy of the module with `new` in place of `old`; the original stays as it is."""
    source = Path(module.__file__).read_text()
    if source.count(old) != 1:
        raise SystemExit(f"assay_liger: this liger-kernel is not 0.8.5: {old.strip()!r} is not where it was")
    path = Path(tempfile.mkdtemp(dir=folder)) / Path(module.__file__).name
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"edited_{path.parent.name}_{path.stem}", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


# ---- the run


def expected(name: str, report: assay.Report) -> bool:
    """Whether the verdict is the expected one.

    Liger's hyper-connections pass, except one gradient that is rounded in bfloat16 (checked on a GPU only). SwiGLU
    fails: its backward overwrites saved inputs, and in bfloat16 its y is rounded twice. Every fault is found.
    """
    wrong = [f for f in report.findings if f.rung != "QUALITY"]
    if name == "swiglu":
        over = [f for f in wrong if f.probe in ("alias", "second_call")]
        twice = [f for f in wrong if f.tensor == "y" and "bfloat16" in f.case]
        return any("the input a was modified" in f.text for f in over) and len(over) + len(twice) == len(wrong)
    if name == "coefficients" and report.device.startswith("cuda"):
        return bool(wrong) and all(f.tensor in ("x.grad", "phi.grad") and "bfloat16" in f.case for f in wrong)
    return report.ok == (name in ("pre", "post_res", "coefficients", *MENDS))


def summary(name: str, report: assay.Report) -> str:
    """One or two lines: the verdict, and the first finding."""
    verdict = f"{name:28} {report.verdict.upper():5} {report.seconds:6.1f} s"
    verdict += "" if expected(name, report) else "   NOT EXPECTED"
    return verdict + "".join(f"\n    {f.rung}  {f.tensor}: {f.text}" for f in report.findings[:1])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=("pre", "post_res", "coefficients", "swiglu", *FAULTS, *MENDS))
    parser.add_argument("--json", metavar="FILE", help="every report, with the versions")
    parser.add_argument("--html", metavar="FILE", help="the same as one page")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(
            "--device cuda: torch sees no CUDA device here; without the option the kernels run in Triton's interpreter"
        )
    if args.device == "cpu" and (gpu := sorted(set(args.only or ()) & set(MENDS))):
        fail(f"--only {' '.join(gpu)}: this edit changes bfloat16 products, which run on a GPU only: --device cuda")
    if importlib.util.find_spec("liger_kernel") is None:
        fail("needs Liger-Kernel: pip install liger-kernel==0.8.5")
    return args


def fail(reason: str) -> None:
    sys.stderr.write(f"assay_liger: {reason}\n")
    raise SystemExit(2)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when Liger imports it
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # the assay feeds NaN on purpose
    from liger_kernel.ops import mhc, swiglu

    versions = {name: importlib.metadata.version(name) for name in ("liger-kernel", "torch", "triton")}
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, Triton's interpreter"
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + f"; {machine}")
    reports: dict[str, assay.Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        candidates = {name: (name, mhc) for name in ("pre", "post_res", "coefficients", "swiglu")}
        for label, (name, old, new) in (FAULTS if args.device == "cpu" else FAULTS | MENDS).items():
            candidates[label] = (name, edited(mhc, Path(folder), old, new))
        for label, (name, module) in candidates.items():
            if args.only is None or label in args.only:
                target = targets(module, swiglu, args.device)[name]
                reports[label] = assay.check(target, device=args.device, raises=False)
                print(summary(label, reports[label]), flush=True)
                if args.json:  # after each target, so that an interrupted run keeps its results
                    result = {"versions": versions, "machine": machine}
                    result["reports"] = {label: report.to_json() for label, report in reports.items()}
                    result["expected"] = {label: expected(label, report) for label, report in reports.items()}
                    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.html:
        from goldsmith.assay.report.html import page

        page.write(list(reports.values()), args.html)
    return 0 if all(expected(label, report) for label, report in reports.items()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
