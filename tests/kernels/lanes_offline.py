"""Compiles product_topk for an H100, and a network whose elements are not in their lanes, without a GPU.

    python tests/kernels/lanes_offline.py {few,all}

Prints a JSON line for each: its name, and the number of traps of `only_in_lanes` in the machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from goldsmith.router._kernels.bounded_selection import bounded_kernel
from goldsmith.router._kernels.lane_sorts import assembly_of_floats
from goldsmith.router.product_topk._triton import NUMBER_BITS

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {"words_ptr": "*i32", "scores_ptr": "*fp32", "indices_ptr": "*i32", "lse_ptr": "*fp32"}
INTEGERS = dict.fromkeys(["stride_x", "stride_y", "SX", "SY"], "i32")


@triton.jit
def misplaced_kernel(a_ptr):
    lane = tl.arange(0, 32)
    text: tl.constexpr = assembly_of_floats("merge", False)
    a = tl.inline_asm_elementwise(text, "=f,f,r", [tl.load(a_ptr + lane), lane ^ 1], tl.float32, True, 1)
    tl.store(a_ptr + lane, a)


def traps(kernel: triton.JITFunction, signature: dict[str, str], **constants: object) -> int:
    source = ASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )  # fmt: skip
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        listing = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    assert "SHFL.BFLY" in listing
    return listing.count("BPT.TRAP")


def forms(which: str) -> Iterator[tuple[str, int]]:
    """Both widths of logits and both lengths of lists; rows that end inside a word use other loads."""
    yield "misplaced", traps(misplaced_kernel, {"a_ptr": "*fp32"})
    for dtype, k, whole in (("bf16", 32, True), ("fp32", 20, True), ("fp16", 33, False), ("fp32", 64, True)):
        if which == "all" or dtype == "bf16":
            room, narrow = (32 if k <= 32 else 64), dtype != "fp32"
            axis = {"WIDTH": 8, "TILES": 1, "EVEN": whole}
            axes = {f"{name}_{at}": value for name, value in axis.items() for at in "XY"}
            yield f"{dtype} {k}", traps(
                bounded_kernel, {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"} | POINTERS | INTEGERS,
                K=k, ROOM=room, BITS=NUMBER_BITS[room], **axes, MANY=False, LSE=narrow, WEIGHTS="none",
            )  # fmt: skip


if __name__ == "__main__":
    for name, count in forms(sys.argv[1]):
        print(json.dumps({"name": name, "traps": count}))
