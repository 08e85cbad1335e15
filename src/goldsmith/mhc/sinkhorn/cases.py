"""Cases and benchmark sizes of mhc.sinkhorn."""

from __future__ import annotations

import torch

from ...assay.declare.case import Case, Make
from ...core.bench import BenchCase
from .._cases import build_cases
from .._common import sum_dtype


def matrices(
    make: Make,
    T: int | tuple[int, ...],
    n: int,
    std: float = 1.0,
    diagonal: float = 0.0,
    iterations: int = 20,
    eps: float = 1e-6,
    form: str = "deepseek",
) -> dict[str, object]:
    """Logits in the dtype of sums (at least float32), and options. A large `diagonal` gives almost the identity."""
    batch = T if isinstance(T, tuple) else (T,)
    logit_dtype = sum_dtype(make.dtype)
    eye = diagonal * torch.eye(n, dtype=logit_dtype, device=make.device)
    return {
        "logits": make.normal(*batch, n, n, std=std, dtype=logit_dtype) + eye,
        "iterations": iterations,
        "eps": eps,
        "form": form,
    }


CASES = build_cases(
    matrices,
    {
        "no_tokens": ({"T": 0, "n": 4}, "an empty result"),
        "published": ({"T": 13, "n": 4}, "DeepSeek's 20 iterations and eps"),
        "small_logits": ({"T": 5, "n": 4, "std": 0.5}, "converged long before the end"),
        "medium_logits": ({"T": 5, "n": 4, "std": 3.0}, "row sums are off by 5e-2 after 20 iterations"),
        "large_logits": ({"T": 5, "n": 4, "std": 10.0}, "far from converged, softmax saturated"),
        "near_identity": (
            {"T": 5, "n": 4, "std": 0.5, "diagonal": 4.0},
            "on the way to the identity, where training ends",
        ),
        "identity": ({"T": 5, "n": 4, "std": 0.5, "diagonal": 8.0}, "the fixed point's gradient is 73 % wrong here"),
        "one_iteration": ({"T": 5, "n": 4, "iterations": 1}, "columns only"),
        "large_eps": ({"T": 5, "n": 4, "eps": 0.02, "iterations": 3}, "where eps sits is part of the model"),
        "no_eps": ({"T": 5, "n": 4, "eps": 0.0, "iterations": 3}, "plain normalisation"),
        "one_stream": ({"T": 3, "n": 1, "iterations": 3}, "dL must be 0"),
        "two_streams": ({"T": 3, "n": 2, "iterations": 3}, "2 x 2"),
        "three_streams": (
            {"T": 3, "n": 3, "eps": 1e-2, "iterations": 3},
            "padding to 4 must not enter the sums through eps",
        ),
        "eight_streams": ({"T": 3, "n": 8, "std": 3.0, "iterations": 5}, "8 x 8"),
        "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "iterations": 2}, "three leading dimensions"),
        "no_leading_dimension": ({"T": (), "n": 4, "iterations": 2}, "one matrix"),
        "megatron": ({"T": 5, "n": 4, "std": 3.0, "iterations": 4, "form": "megatron"}, "Megatron's steps"),
        "log": ({"T": 5, "n": 4, "std": 3.0, "iterations": 4, "form": "log"}, "TransformerEngine's steps"),
        "many_tokens": ({"T": 40961, "n": 4}, "more matrices than one block of any kernel"),
    },
    every_probe=("three_streams",),
)

DTYPES = (torch.float32,)  # logits are float32 for 16-bit streams, too

BENCH = [
    BenchCase(
        name=f"train[T={T}]",
        sizes={"T": T, "n": 4},
        dtype=torch.float32,
        build=Case("train", matrices, {"T": T, "n": 4}).build,
        forward_bytes=2 * T * 64,
        backward_bytes=3 * T * 64,
        why="64 bytes per matrix: logits in, P out; backward logits and grad in, dL out",
    )
    for T in (4096, 8192)
]
