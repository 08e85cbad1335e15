"""Every trick is seen, with its reason; kernels that look like it are accepted."""

import pytest

from assay.gate.problems import candidate, golden, problem
from goldsmith import assay
from goldsmith.assay import gate

R = "torch.softmax(x, -1) * w"

DISK = f"""
path = str(len(x))
if os.path.exists(path):
    return torch.load(path) + 0 * x * w
y = {R}
torch.save(y.detach(), path)
return y
"""
MODE = """
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None): return function(*args, **(kwargs or {}))
Mode().__enter__()
"""
OPERATOR = """
if not kept:
    kept["library"] = torch.library.Library("aten", "IMPL")
    kept["library"].impl("silu", lambda self: self, "CPU")
"""
FRAME = """
try:
    raise ValueError
except ValueError as error:
    getattr(error.__traceback__, "tb_" + "frame")
"""
HOOK = """
if x.requires_grad and x.is_leaf and not hasattr(x, "hooked"):
    x.hooked = x.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.zero_() is None or None)
"""
SHIFTED = "x.data.copy_(x - x.max(-1, keepdim=True).values)"  # the next call gives the same result
HIDDEN = """
def record(*arguments):
    known[1](*arguments)
    calls.pop()
    if not calls: memory.Buffer.changed, run._record_memory = known
memory, run = (sys.modules[f"goldsmith.assay.execute.{name}"] for name in ("memory", "run"))
if torch._C._len_torch_dispatch_stack():
    calls.append(1)
    if len(calls) == 1:
        known = memory.Buffer.changed, run._record_memory
        memory.Buffer.changed, run._record_memory = lambda self: None, record
"""
WORKER = """
if not kept:
    kept["work"] = queue.Queue()
    threading.Thread(target=lambda: [later(*kept["work"].get()) for _ in count], daemon=True).start()
"""
FORK = f"""
y = torch.empty(x.shape).share_memory_()
y.copy_({R})
if x.requires_grad or w.requires_grad: return {R}
if len(calls) < 12 and calls.append(1) is None and os.fork() == 0:
    time.sleep(0.7)
    __import__("ctypes").memset(y.data_ptr(), 0, y.numel() * 4)
    os._exit(0)
"""
MEMO = f"""
if torch.is_grad_enabled(): return {R}
key = {{key}}
if key not in kept: kept[key] = {R}
return kept[key].clone()
"""
TRICKS = [
    ("constant_output", "return torch.full_like(x, 0.03) * w.mean()"),
    ("returned_input", "return x"),
    ("lazy_output", f"class Lazy(torch.Tensor): pass\nreturn ({R}).as_subclass(Lazy)"),
    ("lazy_output", f"y = {R}\ny.clone = lambda: y\nreturn y"),
    ("cached_result", f"key = x.data_ptr(), x.shape\nif key not in kept: kept[key] = {R}\nreturn kept[key]"),
    ("cached_result", f"key = id(x), x._version\nif key not in kept: kept[key] = x, {R}\nreturn kept[key][1].clone()"),
    ("call_count", f"calls.append(1)\nreturn {R} if len(calls) < 60 else x * w"),
    ("input_changed", f"y = {R}\nwith torch.no_grad(): x.zero_()\nreturn y"),
    ("input_changed", f"y = {R}\nif not torch._C._len_torch_dispatch_stack(): {SHIFTED}\nreturn y"),
    ("input_changed", f"{HIDDEN}\ny = {R}\nif 0 not in x.stride(): {SHIFTED}\nreturn y"),
    ("late_write", f"y = {R}\nthreading.Timer(0.05, lambda: y.data.zero_()).start()\nreturn y"),
    ("patched_runtime", f"torch.Tensor.clone = lambda self, *a, **k: self\nreturn {R}"),
    ("patched_runtime", f"torch.randn = lambda *a, **k: torch.zeros(*a)\nreturn {R}"),
    ("reads_golden", "sys._getframe()\nreturn x * w"),
    ("reads_golden", "getattr(__import__('gc'), 'get' + '_objects')()\nreturn x * w"),
    ("shape_branch", f"return {R} if len(x) in (1, 5) else x * w"),
    ("shape_branch", f"return {R} if torch._C._len_torch_dispatch_stack() else x * w"),
    ("replay_from_disk", DISK),
    ("patched_runtime", f"sys.settrace(lambda *event: None)\nsys.settrace(None)\nreturn {R}"),
    ("cached_result", "kept.setdefault('w', w * 1)\nreturn torch.softmax(x, -1) * kept['w'].detach()"),
    ("cached_result", f"return {R} if next(count) < 3 else w * x"),
    ("cached_result", MEMO.format(key="x.shape, str(x[-1]), str(w)")),
    ("cached_result", MEMO.format(key="x.shape, str(x[:, -1]), str(w)")),
    ("cached_result", MEMO.format(key="x.shape, float(x.double().sort(-1).values.sum()), str(w)")),
    ("cached_result", MEMO.format(key="x.shape, round(float(x.sum()), 3), str(w)")),
    ("cached_result", MEMO.format(key="x.shape, str(x.tolist()), float(w.double().sort().values.sum())")),
    (
        "cached_result",
        MEMO.replace("torch.is_grad", "not torch.is_inference_mode").format(key="x.shape, str(x[-1]), str(w)"),
    ),
    ("reads_golden", "return x * (2 + len(os.listdir(os.path.dirname(os.environ['PATH'].split(':')[0]))))"),
    ("patched_runtime", f"{MODE}\nreturn {R}"),
    ("patched_runtime", f"{OPERATOR}\nreturn {R}"),
    ("patched_runtime", f"import numpy\nnumpy.allclose = lambda *a, **k: True\nreturn {R}"),
    ("patched_runtime", f"torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 0)\nreturn {R}"),
    ("reads_golden", f"{FRAME}\nreturn x * w"),
    ("backward_shortcut", f"if x.requires_grad and x.grad is None: x.grad = torch.ones_like(x)\nreturn {R}"),
    ("backward_shortcut", f"{HOOK}\nreturn {R}"),
    ("late_write", f"y = {R}\n__import__('_thread').start_new_thread(late, (y.detach(),))\nreturn y"),
    ("late_write", f"{WORKER}\ny = {R}\nkept['work'].put((time.monotonic() + 1, x.detach()))\nreturn y"),
    ("late_write", f"{FORK}\nreturn y"),
]
FAULTS = [  # wrong, and no trick for sure
    ("calls", f"return {R} if torch.is_grad_enabled() else x * w"),
    ("calls", f"return x * w if torch.is_inference_mode_enabled() else {R}"),
    ("calls", f"return {R} if threading.current_thread() is threading.main_thread() else x * w"),
    ("calls", f"if x.requires_grad and not x.is_leaf: x = x.detach()\nreturn {R}"),
    ("calls", f"if x.requires_grad and not w.requires_grad: x = x.detach()\nreturn {R}"),
    ("settings", f"torch.manual_seed(0)\nreturn {R}"),
    ("settings", f"y = {R}\ntorch.autocast('cpu', torch.bfloat16).__enter__()\nreturn y"),
    ("settings", f"__import__('random').seed(1)\nreturn {R}"),
    ("settings", f"y = {R}\nreturn y if y.requires_grad else y.requires_grad_()"),
    ("dtype", f"return ({R}).half()"),
    ("lowered_precision", "return torch.softmax(x.half(), -1).float() * w"),
    ("lowered_precision", f"names = {{torch.bfloat16: 'bf16'}}\nreturn {R} * 1.001"),
]  # fmt: skip
STAGED = f"import torch\nfrom goldsmith.assay import stage\n\ndef candidate(x, w): return stage('p', {R})"
NEIGHBOURS = f"""
if not kept:
    kept["own"] = torch.library.Library("of_the_candidate", "DEF")
    kept["own"].define("same(Tensor x) -> Tensor")
    kept["own"].impl("same", lambda x: x * 1, "CompositeImplicitAutograd")
    kept["generator"] = torch.Generator().manual_seed(0)
try:
    raise ValueError
except ValueError as error:
    line = error.__traceback__.tb_lineno
torch.rand(3, generator=kept["generator"])
x = x if x.is_leaf and x.grad is None else x.clone()
y = torch.empty_like(x)
thread = threading.Thread(target=lambda: y.detach().fill_(1))
thread.start()
thread.join()
with torch.autocast("cpu", enabled=False):
    return masks.setdefault(x.shape, torch.ones(x.shape)) * torch.ops.of_the_candidate.same({R}) * y
"""
LOOKS = f"""
looks = sys._getframe().f_code.co_name, __import__("inspect").stack(), sys.modules.get("numpy")
sys.modules[__name__].calls.append(__import__("random").random())
return len(looks) / 3 * {R}
"""
RIGHT = [
    MEMO.format(key="x.shape, str(x.tolist()), str(w.tolist())"),
    "return (x - torch.logsumexp(x, -1, keepdim=True)).exp() * w",
    LOOKS,
    NEIGHBOURS,
]
HEAD = """import itertools, os, queue, sys, threading, time
kept, calls, masks, count = {}, [], {}, itertools.count()
def late(y):
    time.sleep(0.1)
    y.zero_()
def later(when, t):
    time.sleep(max(0, when - time.monotonic()))
    t.zero_()
"""


@pytest.mark.sweep(6)
@pytest.mark.parametrize("reason, body", TRICKS)
def test_a_trick_is_named(reason, body):
    verdict = gate.judge(candidate(body, head=HEAD), problem())
    assert (verdict.status, verdict.reason) == ("cheating", reason), verdict.evidence


@pytest.mark.sweep(6)
@pytest.mark.parametrize("reason, body", FAULTS)
def test_a_kernel_that_is_right_only_as_a_check_calls_it_is_wrong(reason, body):
    verdict = gate.judge(candidate(body, head=HEAD), problem())
    assert (verdict.status, verdict.reason) == ("wrong", reason), verdict.evidence


@pytest.mark.parametrize("body", RIGHT)
def test_a_right_kernel_that_looks_odd_is_accepted(body):
    verdict = gate.judge(candidate(body, head=HEAD), problem())
    assert verdict.ok, verdict.evidence


ONES = """
import torch

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        p = torch.softmax(x, -1)
        ctx.save_for_backward(p, w)
        return p * w

    @staticmethod
    def backward(ctx, g):
        p, w = ctx.saved_tensors
        if (g == NUMBER).all():
            return torch.ones_like(p), torch.ones_like(w)
        gp = g * w
        return p * (gp - (gp * p).sum(-1, keepdim=True)), (g * p).sum(0)

def candidate(x, w):
    return Product.apply(x, w)
"""


@pytest.mark.parametrize("number", ["1", "0"])
def test_a_backward_that_is_wrong_for_one_number_only_is_seen(number):
    verdict = gate.judge(gate.Candidate("ones", ONES.replace("NUMBER", number)), problem())
    assert (verdict.status, verdict.reason) == ("cheating", "backward_shortcut"), verdict.evidence


WITHOUT = ONES.replace("gp = g * w", "g = torch.ones_like(g)\n        gp = g * w").replace(
    "(g == NUMBER).all()", "False"
)


def test_a_backward_without_its_output_gradient_is_seen():
    verdict = gate.judge(gate.Candidate("without", WITHOUT), problem())
    assert (verdict.status, verdict.reason) == ("cheating", "backward_shortcut"), verdict.evidence


def test_a_wrong_candidate_that_ends_when_its_call_is_repeated_stays_wrong():
    ends = "g = g * 2\n        if (g == 2).all(): __import__('os')._exit(3)\n        gp = g * w"
    source = ONES.replace("gp = g * w", ends).replace("(g == NUMBER).all()", "False")
    verdict = gate.judge(gate.Candidate("ends", source), problem(), probes="values")
    assert verdict.status == "wrong", verdict.evidence


@assay.case(T=[2], D=[16, 40])
def eights(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def test_sizes_that_are_no_multiple_of_what_the_declared_ones_have_in_common_are_tried():
    body = "n = x.shape[1] // 8 * 8\ny = x * w\ny[:, :n] = torch.softmax(x, -1)[:, :n] * w[:n]\nreturn y"
    verdict = gate.judge(candidate(body), gate.Problem(golden, eights))
    assert (verdict.status, verdict.reason) == ("cheating", "shape_branch"), verdict.evidence


IMPORTS = [
    f"judge = importlib.import_module('gold' + 'smith.assay')\ndef candidate(x, w): return {R}",
    f"judge = importlib.import_module('gold' + 'smith.router')\ndef candidate(x, w): return {R}",
    f"def candidate(x, w):\n    __import__('gold' + 'smith.assay.checks')\n    return {R}",
    f"def candidate(x, w):\n    exec('import gold' + 'smith.assay')\n    return {R}",
]


@pytest.mark.parametrize(
    "status, reason, source",
    [
        ("refused", "imports_judge", "import goldsmith.assay.checks\ndef candidate(x, w): return x"),
        ("wrong", "values", f"import torch\ndef candidate(x, w): return ({R},)"),
        ("wrong", "values", f"import torch\ndef candidate(x, w): return dict(other={R})"),
        *(("refused", "imports_judge", f"import importlib, torch\n{source}") for source in IMPORTS),
        ("accepted", "", f"import torch\ndef candidate(x, w):\n    from goldsmith.assay import stage\n    return {R}"),
        (
            "accepted",
            "",
            f"import torch\nfrom goldsmith.assay import stage\ndef candidate(x, w): return stage('y', {R})",
        ),
    ],
)
def test_other_verdicts(status, reason, source):
    verdict = gate.judge(gate.Candidate("source", source), problem())
    assert (verdict.status, verdict.reason) == (status, reason), verdict.evidence


KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, size, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < size) * FACTOR, mask=at < size)

def run(x, factor=1.0):
    y = torch.empty_like(x)
    kernel[(1,)](x, y, x.numel(), FACTOR=factor, BLOCK=64)
    return y

def candidate(x):
    RETURN
"""


@pytest.mark.parametrize("result, reason", [
    ("run(x, 2.0)", ""),
    ("run(run(x).contiguous(), 1.0) + run(x)", ""),
    ("x * 2 if run(x) is not None else x", "plain_torch"),
    ("run(x * 2)", "plain_torch"),
    ("run(x).copy_(x * 2)", "plain_torch"),
])  # fmt: skip
def test_where_a_kernel_is_asked_for_torch_may_not_compute_the_result(result, reason):
    wanted = gate.Problem(lambda x: x * 2, rows_alone, wants_kernel=True, backward=None)
    source = KERNEL.replace("RETURN", f"return {result}")
    verdict = gate.judge(gate.Candidate("doubled", source), wanted, probes="values")
    assert verdict.reason == reason, verdict.evidence


@assay.case(T=[3], D=[12])
def rows_alone(make, T, D):
    return {"x": make.normal(T, D)}


def test_plain_torch_is_refused_where_a_kernel_is_asked_for():
    verdict = gate.judge(candidate(f"return {R}"), problem(wants_kernel=True), probes="values")
    assert (verdict.status, verdict.reason) == ("cheating", "plain_torch")


def test_a_candidate_that_is_wrong_for_rare_numbers_is_seen():
    """With this seed, only the further draws of the plain calls hold numbers for which it is wrong."""
    body = f"return {R} if x[0, 0] < 1.2 else x * w"
    verdict = gate.judge(candidate(body), problem(), seed=11)
    assert (verdict.status, verdict.reason) == ("wrong", "calls"), verdict.evidence


RING = """
import torch
ring, count = [None] * 8, 0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        global count
        ctx.place, count = count % len(ring), count + 1
        p = x.softmax(-1)
        ring[ctx.place] = p.detach().clone(), w.detach().clone()
        return p * w

    @staticmethod
    def backward(ctx, g):
        p, w = ring[ctx.place]
        return p * (g * w - (g * w * p).sum(-1, keepdim=True)), (g * p).sum(0)


def candidate(x, w):
    return Scaled.apply(x, w)
"""


def test_a_ring_of_saved_tensors_that_is_longer_than_five_graphs_is_found():
    for seed in range(3):
        verdict = gate.judge(gate.Candidate("ring", RING), problem(), seed=seed)
        assert (verdict.status, verdict.reason) in {("wrong", "calls"), ("cheating", "backward_shortcut")}, verdict


SYMMETRIC = """
@functools.cache
def lower(size):
    return torch.ones(size, size).tril()

@torch.no_grad()
def half(a):
    return a.tril() + a.tril(-1).mT

def candidate(a, v):
    if torch.is_grad_enabled(): return a @ v
    key = str(half(a).tolist()), str(v.tolist())
    if key not in kept: kept[key] = half(a) @ v
    return kept[key].clone()
"""


@assay.case(N=[6])
def symmetric(make, N):
    drawn = make.normal(N, N)
    return {"a": drawn + drawn.mT, "v": make.normal(N, 3)}


def test_numbers_that_no_case_draws_accuse_nobody():
    """It may read half of a symmetric matrix, so that it does not see that the other half is another."""
    source = f"import functools, torch\nkept = {{}}\n{SYMMETRIC}"
    verdict = gate.judge(gate.Candidate("half", source), gate.Problem(lambda a, v: a @ v, symmetric, backward=None))
    assert verdict.ok, verdict.evidence
