"""Compiles the kernels that the operators launch, as on an H100, without a GPU.

    python tests/kernels/compile_offline.py {ttir,sums,cubin} {few,small,large} [OPERATOR ...]    a JSON line a variant

Operators run forward and backward on CPU tensors, and Triton's own launcher specialises each launch: it makes integers
equal to 1 constants, which the interpreter never does, and marks multiples of 16. Nothing is computed.
"few" compiles, in float32, all launches of an operator's second case and of cases with a size of 0 or 1, and the first
launch of each kernel in the other cases and in bfloat16. "small" and "large" compile all dtypes, "large" with the
benchmark's cases. Each kernel is also compiled with every specialisable integer set to 1. The last line lists kernels
of the package that nothing launched. "ttir" also lists how many float32 numbers a kernel's sums add. "sums" compiles
the kernels of `READ_ON_ALL_LANES` once and counts their contracted sums.
"""

from __future__ import annotations

import atexit
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, ir, make_backend
from triton.errors import TritonError

from goldsmith import Op
from goldsmith.assay.declare.case import Make
from goldsmith.cli.targets import op_dtypes
from goldsmith.core import autograd, signatures
from goldsmith.core import op as op_module
from goldsmith.core._kernels import launch
from goldsmith.mhc.expand._triton import _expand_fwd_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

READ_ON_ALL_LANES = re.compile("_(sinkhorn|coefficients)_(fwd|bwd)_kernel")
INSTRUCTION = re.compile(r"^\s*([\w.]+)\s+(.*);", re.MULTILINE)


class Card:
    """The part of a driver that the launcher queries before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NotLoaded(SimpleNamespace):
    """Stands for a compiled kernel and launches nothing, but keeps the arguments of the last launch."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        """Nothing."""

    def run(self, *args: object) -> None:
        self.args = args


class Found(dict[Hashable, NotLoaded]):
    """Replaces the launcher's table of compiled kernels. It finds nothing, so that Triton selects for every launch, and
    notes the kernels that the launcher would have taken for each other.
    """

    def __init__(self) -> None:
        self.confused = set[str]()

    def get(self, key: Hashable, default: None = None) -> None:  # type: ignore[override]
        return default

    def __setitem__(self, key: Hashable, known: tuple[Any, tuple[object, ...]]) -> None:
        kernel = known[0].__self__  # of its method run
        if self.setdefault(key, kernel) is not kernel:
            self.confused.add(kernel.name)


class Compiler:
    """Replaces Triton's compiler; the launcher passes each variant once."""

    def __init__(self, level: str) -> None:
        self.level, self.where, self.new_only, self.failed = level, "", False, False
        self.whole, self.known = triton.compiler.compile, set[str]()

    def __call__(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
        known = src.fn.__name__ in self.known
        self.known.add(src.fn.__name__)
        if self.level == "sums":
            if not known and READ_ON_ALL_LANES.fullmatch(src.fn.__name__):
                self.report(src, target, options, self.where)
            return NotLoaded(name=src.fn.__name__)
        if not (self.new_only and known):
            self.report(src, target, options, self.where)
        if not known:
            self.report(all_ones(src), target, options, "every integer 1")
        return NotLoaded(name=src.fn.__name__)

    def report(self, src: ASTSource, target: GPUTarget, options: dict[str, Any], where: str) -> None:
        start, row = time.perf_counter(), {"kernel": src.fn.__name__, "where": where}
        try:
            row |= getattr(self, f"to_{self.level}")(src, target, options)
        except (TritonError, RuntimeError) as error:
            self.failed = True
            row["error"] = str(error)
        print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)

    def to_ttir(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, Any]:
        backend = make_backend(target)
        parsed = backend.parse_options(options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen = backend.get_codegen_implementation(parsed)
        text = str(src.make_ir(target, parsed, codegen, backend.get_module_map(), context))
        sums = re.findall(r'"tt.reduce"\(.*?axis = (\d+).*?\}\) : \(tensor<([\dx]+)xf32', text, re.DOTALL)
        return {"addends": sorted({int(shape.split("x")[int(axis)]) for axis, shape in sums})}

    def to_sums(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, Any]:
        return {"contracted": contracted_sums(self.whole(src, target=target, options=options).asm["ptx"])}

    def to_cubin(self, src: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, Any]:
        kernel = self.whole(src, target=target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        words = dict(word.split(":", 1) for line in usage.splitlines() if "REG:" in line for word in line.split())
        return {"registers": int(words["REG"]), "spilled": int(words["STACK"]), "shared": kernel.metadata.shared}


def contracted_sums(ptx: str) -> int:
    """The additions a * b + (the other lane's a * b), of which the other lane computes a different value."""
    made, found = dict[str, tuple[str, list[str]]](), 0
    for name, text in INSTRUCTION.findall(ptx):
        result, *operands = text.split(", ")
        made[result] = name, operands
        if name.startswith("fma.rn.f"):
            moved, sources = made.get(operands[2], ("", [""]))
            product, factors = made.get(sources[0], ("", []))
            contracted = moved.startswith("shfl.sync") and product.startswith("mul.") and factors == operands[:2]
            found += contracted
    return found


def all_ones(src: ASTSource) -> ASTSource:
    signature, constants = dict(src.signature), dict(src.constants)
    for place, (name, kind) in enumerate(src.signature.items()):
        if kind in ("i32", "i64") and not src.fn.params[place].do_not_specialize:
            signature[name], constants[(place,)] = "constexpr", 1
    attrs = {path: value for path, value in src.attrs.items() if path not in constants}
    return ASTSource(src.fn, signature, constants, attrs)


class Untouched(Make):
    """Draws uninitialised memory, so that tables of gigabytes cost nothing."""

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=self.dtype if dtype is None else dtype)


def calls(op: Op, which: str) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Calls as (name, whether known kernels may be skipped, inputs and options)."""
    for case in op.cases:
        if ("large" in case.tags) == (which == "large"):
            edge = case is op.cases[1] or any(isinstance(s, int) and s < 2 or s == () for s in case.sizes.values())
            for dtype in (torch.float32, torch.bfloat16) if which == "few" else op_dtypes(op):
                known = which == "few" and not (edge and dtype == torch.float32)
                yield f"{case} {dtype}", known, case.build(dtype, "cpu", make=Untouched)
    if "sparse_grad" in op.options:  # the assay's cases have dense gradients
        yield "row-sparse", True, op.cases[1].build(torch.float32, "cpu", make=Untouched) | {"sparse_grad": True}
    for case in op.bench if which == "large" else ():
        yield f"{case.name} {case.dtype}", False, case.build(case.dtype, "cpu", make=Untouched)


def call(op: Op, values: dict[str, Any], made: list[torch.Tensor] | None = None) -> None:
    """Forward and backward; `made` receives the inputs, the results and all gradients."""
    tensors = [values.get(name) for name in op.inputs]
    tensors = [
        t.detach().requires_grad_() if t is not None and name in op.grads and t.is_floating_point() else t
        for name, t in zip(op.inputs, tensors, strict=True)
    ]
    options = {name: values[name] for name in op.options}
    if op.why_not("triton", *tensors, **options) is None:
        results = op(*tensors, backend="triton", **options)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        if results:
            grads = [torch.ones_like(r) for r in results]
            torch.autograd.backward(results, grads)
            if made is not None:
                given = [t for t in tensors if t is not None]
                made += [*given, *results, *grads, *(t.grad for t in given if t.grad is not None)]


def kernels() -> set[str]:
    """Names of the package's kernels that are launched, not only called by another kernel."""
    names = set[str]()
    for name, module in list(sys.modules.items()):
        if name.startswith("goldsmith."):
            own = (value for value in vars(module).values() if isinstance(value, triton.JITFunction))
            names |= {f.__name__ for f in own if f.__name__.endswith("_kernel") and f.module == name}
    return names


def launches_alike() -> None:
    """Launches that differ in what Triton selects by, and in nothing else."""
    memory = torch.empty(64)
    for x, stride in ((memory[:6], 3), (memory[1:7], 3), (memory[:6].half(), 3), (memory[:6], 1), (memory[:6], 1.0)):
        launch.run(_expand_fwd_kernel, (2, 1), x, memory[16:], stride, 3, 4, 16, num_warps=4)


def repeated_launch_differs() -> bool:
    """Whether the launcher passes other arguments to a kernel that it finds again than Triton passed."""
    launch._compiled = dict[Hashable, Any]()
    passed = []
    for _ in "12":
        launch.run(_expand_fwd_kernel, (2, 1), torch.empty(2, 3), torch.empty(2, 4, 3), 3, 3, 4, 16, num_warps=4)
        ((start, _),) = launch._compiled.values()
        passed.append(start.__self__.args)
    (*begin, _, _, _, x, y), (*same, _, _, _, x_2, y_2) = (arguments[:11] for arguments in passed)
    pointers = all(map(isinstance, (x, y, x_2, y_2), (torch.Tensor, torch.Tensor, int, int)))
    return not pointers or begin != same or passed[0][11:] != passed[1][11:]


def wrongly_repeated() -> list[str]:
    """Operators whose repeated calls launch something else than computed calls of other tensors."""
    empty, kept, passed = torch.empty, list[torch.Tensor](), list[tuple[object, ...]]()

    def keeping(*args: Any, **options: Any) -> torch.Tensor:
        kept.append(empty(*args, **options))  # so that no address is used twice
        return kept[-1]

    def launches(op: Op) -> list[list[object]]:
        """The launches of forward and backward, with names in place of addresses."""
        kept.clear()
        passed.clear()
        call(op, op.cases[1].build(torch.bfloat16, "cpu", make=Untouched), made := list[torch.Tensor]())
        names = {t.data_ptr(): str(i) for i, t in enumerate(made)}
        name = lambda a: names.setdefault(a, f"new {len(names)}") if isinstance(a, int) and a > 2**24 else a  # noqa: E731
        return [[name(a) for a in args] for args in passed]

    start = lambda compiled: (lambda *args: passed.append((compiled.name, *args)), ())  # noqa: E731
    wrong = list[str]()
    anew = mock.patch.dict(signatures._repetitions, clear=True)
    with anew, mock.patch.multiple(launch, _starting=start, _compiled={}), mock.patch("torch.empty", keeping):
        for op in Op.all().values():
            if "triton" in op.backends and getattr(op.backend("triton"), "LAUNCHES_ONLY", False):
                repeated = [launches(op) for _ in "123"][2]
                alone = lambda what, tensors, compute: compute()  # noqa: E731
                with mock.patch.object(op_module, "repeated", alone), mock.patch.object(autograd, "repeated", alone):
                    wrong += [op.name] * (launches(op) != repeated or not repeated)
    return wrong


def main(level: str, which: str, *only: str) -> int:
    compiler, launch._compiled = Compiler(level), Found()
    triton.runtime.driver.set_active(Card())
    triton.compiler.compile = compiler
    for op in Op.all().values():
        if "triton" in op.backends and (op.name in only or not only):
            object.__setattr__(op.backends["triton"], "machine", lambda tensors: None)
            for name, compiler.new_only, values in calls(op, which):
                compiler.where = f"{op.name} {name}"
                call(op, values)
    launches_alike()
    confused = sorted(launch._compiled.confused) + ["a repeated launch"] * repeated_launch_differs()
    confused += [f"a repeated {name}" for name in wrongly_repeated()]
    print(json.dumps({"not_launched": sorted(kernels() - compiler.known), "confused": confused}))
    return int(compiler.failed)


if __name__ == "__main__":
    atexit.register(gc.freeze)  # otherwise the interpreter's end searches torch for garbage
    sys.exit(main(*sys.argv[1:]))
