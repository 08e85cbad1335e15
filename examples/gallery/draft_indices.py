"""Indices of the tokens that each request keeps, in blocks, in Triton. Each block of a request writes the same ones.

After https://github.com/vllm-project/vllm/issues/15908 (ekagra-ranjan, 2025).
"""

import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def _indices(index_ptr, first_ptr, offset_ptr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    start = tl.load(offset_ptr + request)
    count = tl.load(offset_ptr + request + 1) - start
    first = tl.load(first_ptr + request)
    token = tl.arange(0, BLOCK)
    for block in range(0, count, BLOCK):
        place = block + token
        tl.store(index_ptr + start + place, first + token, place < count)


def indices(first, offset):
    """first[r]: place of request r's first token. offset[r]: tokens that the requests before r keep."""
    index = torch.empty(int(offset[-1]), dtype=torch.int64, device=first.device)
    _indices[(len(first),)](index, first.contiguous(), offset.contiguous(), BLOCK=4)
    return index


def golden(first, offset):
    counts = offset.diff()
    start = torch.repeat_interleave(first - offset[:-1], counts)
    return start + torch.arange(len(start), device=first.device)


def _requests(counts, rejected):
    kept, all_tokens = torch.tensor(counts), torch.tensor(counts) + torch.tensor(rejected)
    return {
        "first": all_tokens.cumsum(0) - all_tokens,
        "offset": torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)]),
    }


@assay.case()
def short(make):
    return _requests([3, 4, 1], [1, 0, 2])


@assay.case()
def long(make):
    return _requests([6, 3, 9], [0, 2, 1])


target = assay.Target(indices, golden, cases=[*short, *long], backward=None, outputs=("index",), name="draft_indices")
