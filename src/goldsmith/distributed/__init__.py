"""Models with this library's layers on several GPUs: FSDP2 groups, expert parallelism, one norm of all gradients."""

from .expert_parallel import ExpertParallel
from .fsdp import shard
from .gradient_mean import average_gradients
from .gradient_norm import clip_grad_norm

__all__ = ["ExpertParallel", "average_gradients", "clip_grad_norm", "shard"]
