"""Sorting networks on tuples: element i of every row's list is one tensor, so a row is in the registers of one lane.

A compare-and-exchange is then a maximum and a minimum without a shuffle. Keeping the 32 largest of many numbers costs
21 instructions per number; a sort across the lanes costs about 200.

On a GPU a network is one inline PTX block. Written as a thousand Triton operations it gives the same machine code, but
TritonGPUCoalesce, whose time is quadratic in their number, takes minutes (Triton 3.6, K = 32).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.device import triton_interpreted

INTERPRET = tl.constexpr(triton_interpreted())


@triton.constexpr_function
def log2_up(n):
    """The smallest p with 2^p >= n."""
    return max(n - 1, 0).bit_length()


@triton.constexpr_function
def higher(i, stride, block):
    """Whether position i keeps the larger of its pair: lists descend where the position's bit `block` is 0."""
    return ((i & stride) == 0) == ((i & block) == 0)


@triton.constexpr_function
def assembly(log, bits, first):
    """The network as PTX; it writes the results last, so that they may share registers with the arguments."""
    count = 1 << log
    steps = [(1 << q, 1 << p) for p in range(first, log + 1) for q in reversed(range(p))]
    lines = [f".reg .b{bits} v<{count * (len(steps) + 1)}>;"]
    lines += [f"mov.b{bits} v{i}, ${count + i};" for i in range(count)]
    for s in range(len(steps)):
        stride, block = steps[s]
        for i in range(count):
            take = "max" if higher(i, stride, block) else "min"
            a, b, to = s * count + i, s * count + (i ^ stride), (s + 1) * count + i
            lines.append(f"{take}.s{bits} v{to}, v{a}, v{b};")
    lines += [f"mov.b{bits} ${i}, v{len(steps) * count + i};" for i in range(count)]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def constraints(count, bits):
    kind = "r" if bits == 32 else "l"
    return ",".join([f"={kind}"] * count + [kind] * count)


@triton.jit
def network(a, FIRST: tl.constexpr):
    """The steps of a bitonic sort of 2^p numbers that merge lists of 2^(FIRST - 1) or more; FIRST = 1 sorts fully."""
    LOG: tl.constexpr = log2_up(len(a))
    if INTERPRET:
        for p in tl.static_range(FIRST, LOG + 1):
            for q in tl.static_range(p):
                out = ()
                for i in tl.static_range(len(a)):
                    if higher(i, 1 << (p - 1 - q), 1 << p):
                        out = out + (tl.maximum(a[i], a[i ^ (1 << (p - 1 - q))]),)
                    else:
                        out = out + (tl.minimum(a[i], a[i ^ (1 << (p - 1 - q))]),)
                a = out
    elif FIRST <= LOG:
        BITS: tl.constexpr = a[0].dtype.primitive_bitwidth
        text: tl.constexpr = assembly(LOG, BITS, FIRST)
        a = tl.inline_asm_elementwise(text, constraints(len(a), BITS), a, (a[0].dtype,) * len(a), True, 1)
    return a


@triton.jit
def descending(a):
    """Sorts a list of 2^p numbers, descending."""
    return network(a, 1)


@triton.jit
def bitonic_merge(a):
    """Sorts a bitonic list of 2^p numbers, descending."""
    return network(a, log2_up(len(a)))


@triton.jit
def greatest(a, b):
    """The len(a) largest of two descending lists, descending; len(a) is 2^p, and b is not longer."""
    kept = ()
    for i in tl.static_range(len(a)):
        if len(a) - 1 - i < len(b):
            kept = kept + (tl.maximum(a[i], b[len(a) - 1 - i]),)
        else:
            kept = kept + (a[i],)
    return bitonic_merge(kept)
