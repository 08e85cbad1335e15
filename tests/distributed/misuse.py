"""Mistakes that ranks make on purpose."""

import os
import time

import torch
from torch.distributed import all_reduce, get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from goldsmith import mhc, router


def message_of(mistake):
    """(class, message) of the error that a wrong call raises."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    other = init_device_mesh("cpu", (1, get_world_size()))
    x, f, post, res = (torch.ones(shape) for shape in ((4, 2, 6), (4, 6), (4, 2), (4, 2, 2)))
    placed = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, f, post, res)]
    try:
        if mistake == "plain_tensor":
            placed[1] = f
        elif mistake == "two_meshes":
            placed[1] = distribute_tensor(f, other, [Replicate(), Shard(0)])
        elif mistake == "wrong_shape":
            placed[1] = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
        elif mistake == "impossible_id":
            tables = [distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]) for _ in range(2)]
            tokens = [torch.ones(4, 6), torch.ones(4, 2), torch.full((4, 2), 8)]
            h, weights, indices = (distribute_tensor(t, mesh, [Replicate()]) for t in tokens)
            router.atomic_experts(h, *tables, weights, indices)
        mhc.post(*placed)
    except Exception as error:  # noqa: BLE001  the test compares it
        return type(error).__name__, str(error)
    return None, "nothing was raised"


def fail(mistake):
    """Rank 1 fails, while rank 0 waits for it."""
    if get_rank() == 1:
        if mistake == "raises":
            raise ValueError("no such thing")
        if mistake == "dies":
            os._exit(7)
        time.sleep(60)
    all_reduce(torch.ones(1))
