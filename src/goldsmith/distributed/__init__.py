"""Models with this library's layers on several GPUs: FSDP2 groups, expert parallelism, gradients, shared experts."""

from .expert_parallel import ExpertParallel
from .fsdp import shard
from .gradient_mean import average_gradients
from .gradient_norm import clip_grad_norm
from .ordered_sums import sum_in_rank_order
from .shared_base import machine_group, shared_base

__all__ = [
    "ExpertParallel",
    "average_gradients",
    "clip_grad_norm",
    "machine_group",
    "shard",
    "shared_base",
    "sum_in_rank_order",
]
