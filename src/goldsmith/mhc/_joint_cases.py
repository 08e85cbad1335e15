"""Sizes that the cases of boundary and connect_backward share: both operators combine pre and post."""

from __future__ import annotations

from collections.abc import Mapping

JOINT_CASES: dict[str, tuple[Mapping[str, object], str]] = {
    "no_tokens": ({"T": 0, "n": 4, "dim": 5}, "empty outputs, zero parameter gradients of the right shape"),
    "one_token": ({"T": 1, "n": 4, "dim": 64, "iterations": 3}, "decoding; the sums over tokens have one term"),
    "published": ({"T": 3, "n": 4, "dim": 64, "gamma": False, "std": 1.28}, "DeepSeek's form"),
    "out_in": ({"T": 3, "n": 4, "dim": 7, "orientation": "out_in", "iterations": 3}, "Megatron's orientation"),
    "odd_dim": ({"T": 2, "n": 4, "dim": 129, "iterations": 2}, "one past a power of two"),
    "one_channel": ({"T": 3, "n": 4, "dim": 1, "iterations": 2}, "a block over dim that is almost all mask"),
    "two_slices": ({"T": 2, "n": 1, "dim": 515, "iterations": 1}, "the second slice of the sum is almost all mask"),
    "one_stream": ({"T": 2, "n": 1, "dim": 5, "iterations": 2}, "softmax of one number: dL is 0"),
    "three_streams": (
        {"T": 3, "n": 3, "dim": 5, "std": 3.0, "sinkhorn_eps": 1e-2, "iterations": 3},
        "n and M = 15 are not powers of two",
    ),
    "two_streams": ({"T": 3, "n": 2, "dim": 5, "iterations": 2, "diagonal": 4.0}, "half way to the identity"),
    "eight_streams": ({"T": 2, "n": 8, "dim": 5, "std": 0.5, "iterations": 2}, "M = 80"),
    "large_logits": ({"T": 2, "n": 4, "dim": 5, "std": 10.0}, "Sinkhorn far from converged; softmax saturated"),
    "near_identity": ({"T": 2, "n": 4, "dim": 5, "std": 0.5, "diagonal": 8.0}, "the trained state"),
    "leading_dimensions": ({"T": (2, 1, 3), "n": 4, "dim": 5, "iterations": 2}, "leading dimensions"),
    "many_tokens": ({"T": 4097, "n": 4, "dim": 320}, "sums over more tokens than any one block"),
    "usual_width": ({"T": 129, "n": 4, "dim": 4096, "std": 1.28}, "the width that is usual in training"),
    "wide": ({"T": 33, "n": 4, "dim": 7168, "std": 2.56}, "DeepSeek's widest K"),
}
