"""Cases and benchmark sizes of router.atomic_experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...assay.declare.case import Case, Make
from ...core.bench import BenchCase
from .._common import sum_dtype


def routing(make: Make, batch: tuple[int, ...], K: int, N: int, kind: str) -> Tensor:
    """Indices [*batch, K] of N experts by kind

    "uniform"; "skew": half go to expert N // 2; "twice": each expert of a list occurs twice; "holes": about a third is
    -1, and all of the first list; "none": all -1; "one": all go to the last expert.
    """
    if kind in ("none", "one"):
        return torch.full((*batch, K), -1 if kind == "none" else N - 1, dtype=torch.int32, device=make.device)
    drawn = make.integers(0, N, *batch, K, dtype=torch.int32)
    other = make.integers(0, 6, *batch, K, dtype=torch.int32)
    if kind == "skew":
        return torch.where(other < 3, N // 2, drawn)
    if kind == "twice":
        return torch.cat([drawn[..., : K - K // 2], drawn[..., : K // 2]], -1)
    if kind == "holes":
        drawn = torch.where(other < 2, -1, drawn)
        if batch:
            drawn[(0,) * len(batch)] = -1
    return drawn


def inputs(
    make: Make,
    T: int | tuple[int, ...],
    D: int,
    N: int,
    K: int,
    E: int | None = None,
    kind: str = "uniform",
    activation: str = "silu",
    strategy: str = "gather",
    memory: bool = False,
    layout: str = "contiguous",
    long: bool = False,
    sparse: bool = False,
) -> dict[str, object]:
    """Inputs and options of atomic_experts; T is a number of tokens, or all leading dimensions; memory: w_in is None.

    layout "strided": h and both tables are every second column of wider tensors, like slices of a fused projection;
    "transposed": all three are column-major. sparse: the tables' gradients are row-sparse.
    """
    batch, E = T if isinstance(T, tuple) else (T,), D if E is None else E
    step = 2 if layout == "strided" else 1

    def drawn(*shape: int, std: float) -> Tensor:
        if layout == "transposed":
            return make.normal(*shape[:-2], shape[-1], shape[-2], std=std).mT
        return make.normal(*shape[:-1], shape[-1] * step, std=std)[..., ::step]

    indices = routing(make, batch, K, N, kind)
    return {
        "h": drawn(*batch, D, std=1.0),
        "w_in": None if memory else drawn(N, D, std=D**-0.5),
        "w_out": drawn(N, E, std=1.0),
        "weights": make.normal(*batch, K, dtype=sum_dtype(make.dtype)),
        "indices": indices.long() if long else indices,
        "activation": activation,
        "strategy": strategy,
        "sparse_grad": sparse,
    }


_CASES: dict[str, tuple[dict[str, object], str]] = {
    "no_tokens": ({"T": 0, "D": 5, "N": 7, "K": 3}, "empty output, zero gradients of the tables"),
    "one_token": ({"T": 1, "D": 16, "N": 9, "K": 4}, "decoding"),
    "uniform": ({"T": 13, "D": 8, "N": 40, "K": 6}, "most experts have one token or none"),
    "gelu": ({"T": 5, "D": 7, "N": 11, "K": 3, "activation": "gelu"}, "PEER's activation; D odd"),
    "gelu_tanh": ({"T": 5, "D": 6, "N": 11, "K": 3, "activation": "gelu_tanh"}, "the approximation by tanh"),
    "relu": ({"T": 5, "D": 6, "N": 11, "K": 3, "activation": "relu"}, "half of the hidden values are 0"),
    "relu2": ({"T": 5, "D": 6, "N": 11, "K": 3, "activation": "relu2"}, "relu squared"),
    "identity": ({"T": 5, "D": 6, "N": 11, "K": 3, "activation": "identity"}, "no activation: rank-one experts"),
    "memory": (
        {"T": 6, "D": 5, "N": 9, "K": 4, "memory": True},
        "product-key memory: no w_in, and h only determines the dtype",
    ),
    "narrow_output": ({"T": 5, "D": 12, "N": 9, "K": 3, "E": 5}, "E is not D"),
    "one_channel": ({"T": 4, "D": 1, "N": 5, "K": 3, "E": 1}, "blocks over D and E that are almost all mask"),
    "ones": (
        {"T": 1, "D": 1, "N": 1, "K": 1},
        "all sizes are 1: Triton makes integers of 1 constants, and every stride is 1",
    ),
    "odd_dim": ({"T": 3, "D": 129, "N": 6, "K": 5, "E": 65}, "one past powers of two: tails of blocks"),
    "wide": (
        {"T": 2, "D": 1030, "N": 4, "K": 130, "E": 5, "kind": "one"},
        "more slabs per row than partial dots are kept, more columns than a block of the second stage",
    ),
    "skew": ({"T": 33, "D": 8, "N": 16, "K": 4, "kind": "skew"}, "one expert takes half of all pairs"),
    "long_lists": (
        {"T": 90, "D": 3, "N": 5, "K": 8, "kind": "skew"},
        "one expert has more pairs than a block of the second stage, and its list starts inside a block",
    ),
    "one_expert": ({"T": 19, "D": 6, "N": 8, "K": 3, "kind": "one"}, "every pair goes to the last expert"),
    "twice": ({"T": 7, "D": 6, "N": 9, "K": 5, "kind": "twice"}, "an expert that occurs twice in a list counts twice"),
    "holes": ({"T": 9, "D": 6, "N": 7, "K": 5, "kind": "holes"}, "-1 is skipped; one token has only -1"),
    "nothing": ({"T": 4, "D": 6, "N": 7, "K": 3, "kind": "none"}, "every index -1: zeros everywhere"),
    "one_of_k": ({"T": 9, "D": 6, "N": 7, "K": 1, "long": True}, "K = 1; indices in int64"),
    "more_k_than_experts": ({"T": 5, "D": 6, "N": 3, "K": 8}, "K > N: duplicates are certain"),
    "leading_dimensions": ({"T": (2, 1, 3), "D": 6, "N": 9, "K": 3}, "leading dimensions as they come"),
    "no_leading_dimension": ({"T": (), "D": 6, "N": 9, "K": 3}, "one token without a batch"),
    "strided": ({"T": 5, "D": 6, "N": 9, "K": 3, "layout": "strided"}, "h and tables are slices of wider tensors"),
    "transposed": (
        {"T": 5, "D": 6, "N": 9, "K": 3, "E": 4, "layout": "transposed"},
        "h and tables lie column by column: neighbours in a row are not neighbours in memory",
    ),
    "sorted": ({"T": 13, "D": 8, "N": 10, "K": 5, "strategy": "sorted"}, "pairs by expert"),
    "sorted_holes": (
        {"T": 9, "D": 6, "N": 7, "K": 5, "kind": "holes", "strategy": "sorted", "activation": "relu"},
        "pairs by expert, skipped ones after the last",
    ),
    "dense": ({"T": 13, "D": 8, "N": 10, "K": 5, "strategy": "dense"}, "every expert for every token, masked"),
    "dense_twice": (
        {"T": 35, "D": 5, "N": 6, "K": 5, "E": 7, "kind": "twice", "strategy": "dense", "activation": "gelu"},
        "duplicates add up in the mask; more tokens than a tile",
    ),
    "dense_transposed": (
        {"T": 5, "D": 6, "N": 9, "K": 3, "E": 4, "layout": "transposed", "strategy": "dense"},
        "matrix products with tables that lie column by column",
    ),
    "dense_holes": (
        {"T": 9, "D": 6, "N": 7, "K": 5, "kind": "holes", "strategy": "dense", "memory": True},
        "skipped pairs are in no expert's column",
    ),
    "many_experts": (
        {"T": 1024, "D": 64, "N": 100_000, "K": 80},
        "more active experts than a grid axis counts: 65,535",
    ),
    "usual": ({"T": 1024, "D": 1024, "N": 65_536, "K": 32}, "OmniMoE's size"),
    "usual_skew": ({"T": 4096, "D": 256, "N": 4096, "K": 32, "kind": "skew"}, "an expert with 65,536 pairs"),
    "usual_sorted": ({"T": 4096, "D": 512, "N": 4096, "K": 64, "strategy": "sorted"}, "64 pairs an expert"),
    "tiles_of_dense": (
        {"T": 4200, "D": 64, "N": 9000, "K": 16, "kind": "holes", "strategy": "dense"},
        "more tokens and more experts than one tile holds",
    ),
    "a_sixteenth": ({"T": 16, "D": 256, "N": 65_536, "K": 4096}, "the share of experts at which dense is chosen"),
    "a_sixteenth_dense": (
        {"T": 16, "D": 256, "N": 8192, "K": 512, "strategy": "dense"},
        "the share of experts from which dense is chosen",
    ),
    "usual_dense": ({"T": 512, "D": 512, "N": 2048, "K": 256, "strategy": "dense"}, "an eighth of all experts"),
}
_EVERY_PROBE = ("gelu", "sorted_holes")


def _tags(name: str, sizes: dict[str, Any]) -> tuple[str, ...]:
    large = ("large",) * (sizes["N"] > 1000)
    return ("every_probe",) * (name in _EVERY_PROBE) + large


CASES = [Case(name, inputs, sizes, why, _tags(name, sizes)) for name, (sizes, why) in _CASES.items()]


def _bench(
    letter: str, T: int, D: int, N: int, k: int, strategy: str = "gather",
    sparse: bool = False, memory: bool = False, cpu: bool = False,
) -> BenchCase:  # fmt: skip
    tables, gradients = 1 if memory else 2, "row-sparse" if sparse else "dense"
    why = (
        f"rows of {'the table' if memory else 'both tables'} once each, tokens {'once' if memory else 'twice'}, "
        f"weights and indices; backward with {gradients} gradients of the tables"
    )
    arguments = {"T": T, "D": D, "N": N, "K": k, "strategy": strategy, "sparse": sparse, "memory": memory}
    mark = "_sparse" if sparse else "_memory" if memory else "" if strategy == "gather" else f"_{strategy}"
    case = Case(f"{letter}{mark}[T={T},D={D},N={N},k={k}]", inputs, arguments, why)
    dtype = torch.float32 if cpu else torch.bfloat16  # 16 bits are no faster on a CPU
    pairs, size = T * k, dtype.itemsize
    rows = N * (1 - (1 - 1 / N) ** pairs)  # distinct experts of a uniform routing
    forward = round(tables * size * (rows + T) * D + 12 * pairs)
    backward = round(tables * size * (rows + (rows if sparse else N)) * D + (1 + tables) * size * T * D + 16 * pairs)
    sizes = {"T": T, "D": D, "N": N, "k": k}
    return BenchCase(
        case.name, sizes, dtype, case.build, forward, backward, why, () if memory else ("w_in",), on_cpu=cpu
    )


_SIZES = {"A": (4096, 1024, 65_536, 32), "B": (16_384, 2048, 65_536, 64), "C": (4096, 1024, 2**20, 32)}
_CROSSING = {f"k{k}": (4096, 1024, 65_536, k) for k in (256, 1024, 4096)}
_FEW = {f"t{T}": (T, 1024, 65_536, 4096) for T in (16, 256, 1024)}
_ON_A_CPU = {
    "small": (2048, 512, 16_384, 16),
    **{f"small-k{k}": (512, 512, 4096, k) for k in (128, 256, 512)},
    **{f"small-t{T}": (T, 512, 4096, 512) for T in (1, 16, 64)},
}
_BOTH = ("gather", "dense")
BENCH = [
    *(_bench(letter, *sizes) for letter, sizes in _SIZES.items()),
    _bench("C", *_SIZES["C"], sparse=True),
    _bench("A", *_SIZES["A"], memory=True),
    *(_bench(letter, *sizes, strategy="dense") for letter, sizes in _SIZES.items()),
    *(_bench(name, *sizes, strategy=s) for name, sizes in (_CROSSING | _FEW).items() for s in _BOTH),
    _bench("small", *_ON_A_CPU["small"], memory=True, cpu=True),
    *(_bench(name, *sizes, strategy=s, cpu=True) for name, sizes in _ON_A_CPU.items() for s in _BOTH),
]
