"""Runs the experts' kernels on all cases that are not large, on each level, forward and backward."""

import torch

from goldsmith import experts
from goldsmith.core import Op, native
from goldsmith.experts import _native_abi

# the kernels use three threads and torch itself one, because ThreadSanitizer does not understand OpenMP's waits
native.threads = _native_abi.threads = lambda: 3
_native_abi.busy = lambda weights, flop: 3
LIBRARY = native.library()
OPS = [op for name, op in sorted(Op.all().items()) if "native" in op.backends]


def call(op, case, dtype):
    arguments = case.build(dtype)
    tensors, options = [arguments.get(name) for name in op.inputs], {name: arguments[name] for name in op.options}
    if op.why_not("native", *tensors, **options) is not None:
        return 0
    for tensor, name in zip(tensors, op.inputs, strict=True):
        if tensor is not None and name in op.grads and tensor.is_floating_point():
            tensor.requires_grad_()
    results = op(*tensors, backend="native", **options)
    results = results if isinstance(results, tuple) else (results,)
    if any(result.requires_grad for result in results):
        sum(result.float().sum() for result in results).backward()
    return 1


def wide(format):
    """Nine steps of 32 inputs and five of outputs, more than there are buffers for tiles that 20 rows use once."""
    group = 32 if format.startswith("int4") else None
    base = experts.pack(torch.randn(1, 320, 288), torch.randn(1, 288, 160), format=format, group_size=group)
    x = torch.randn(20, 288).bfloat16().requires_grad_()
    experts.moe(x, torch.zeros(20, 1, dtype=torch.int64), torch.rand(20, 1), base).float().sum().backward()
    return 1


done = 0
for level in range(LIBRARY.gs_machine_level() + 1):
    native.check(LIBRARY.gs_set_level(level))
    # the other levels only add instructions for bfloat16 and bytes
    for dtype in (torch.float32, torch.bfloat16) if native.isa() in ("scalar", "avx2", "avx512") else (torch.bfloat16,):
        done += sum(call(op, case, dtype) for op in OPS for case in op.cases if "large" not in case.tags)
    done += sum(map(wide, ("bf16", "int4", "int4_asym", "int8", "mxfp4", "fp8_block")))
assert done > 50, done
print(done, "calls")
