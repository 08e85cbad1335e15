"""Guard bands, poison, layouts and shared memory: effects of a run beyond its results."""

import pytest
import torch

from assay.kernels import autograd, plain_sum, probes_of, sum_gradients, target, texts
from goldsmith import assay
from goldsmith.assay.execute import memory
from goldsmith.assay.execute.memory import Arena, Poison, overlap, strides_for
from goldsmith.assay.execute.memory_marks import band_read, poison_left

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool, torch.complex64)


def quick(kernel, **more):
    return assay.check(target(kernel, **more), probes="quick", raises=False)


# guard bands


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_body_is_aligned_to_256_bytes_between_bands_that_hold_nan(dtype):
    buffer = Arena().allocate((3, 5), (5, 1), dtype, torch.device("cpu"), "x")
    assert buffer.tensor.data_ptr() % 256 == 0 and buffer.tensor.shape == (3, 5)
    before, after = buffer.raw[: buffer.start], buffer.raw[buffer.start + buffer.size :]
    assert min(len(before), len(after)) >= 1024 and buffer.overrun() is None
    if dtype in FLOATS:
        beyond = torch.as_strided(buffer.tensor, (17,), (1,), buffer.tensor.storage_offset() - 1)
        assert beyond[0].isnan() and beyond[-1].isnan() and band_read(beyond).tolist() == [True, *[False] * 15, True]


@pytest.mark.parametrize("offset, text", [
    (15, "4 bytes written past the end of y (60 bytes), up to 4 bytes away"),
    (29, "4 bytes written past the end of y (60 bytes): exactly twice the buffer"),
    (-2, "4 bytes written before the start of y (60 bytes), up to 8 bytes away"),
])  # fmt: skip
def test_an_overrun_reports_its_size_and_distance(offset, text):
    buffer = Arena().allocate((15,), (1,), torch.float32, torch.device("cpu"), "y")
    torch.as_strided(buffer.tensor, (1,), (1,), buffer.tensor.storage_offset() + offset).fill_(3.0)
    assert buffer.overrun().text == text


def test_a_write_between_the_elements_of_a_strided_input_is_an_overrun():
    arena = Arena()
    placed = arena.place("x", torch.arange(12.0).view(3, 4), "stepped")
    assert not arena.overruns() and placed.tolist() == torch.arange(12.0).view(3, 4).tolist()
    torch.as_strided(placed, (1,), (1,), placed.storage_offset() + 1).fill_(0)
    assert [h.text for h in arena.overruns()] == ["4 bytes written between the elements of x (92 bytes)"]


def test_an_overrun_of_a_buffer_that_the_kernel_made_is_named():
    def kernel(x, w):
        y = torch.empty(len(x))
        torch.as_strided(y, (2 * len(x),), (1,), y.storage_offset()).fill_(0)
        return y + plain_sum(x, w)

    (text,) = texts(quick(kernel))
    assert (
        text == "48 bytes written past the end of scratch buffer 1 [12] (48 bytes): exactly twice the buffer (values)"
    )


def test_an_overrun_of_a_result_names_the_result():
    def kernel(x, w):
        y = torch.empty(len(x))
        torch.as_strided(y, (2 * len(x),), (1,), y.storage_offset()).copy_(plain_sum(x, w).repeat(2))
        return y

    report = quick(kernel, backward=lambda x, w, grad_y: overrun(x, w, grad_y), outputs=("y",))
    by_name = {f.tensor: f.text for f in report.findings}
    message = "48 bytes written past the end of y (48 bytes): exactly twice the buffer (values)"
    assert by_name["y"] == message and by_name["w.grad"].startswith(
        "160 bytes written past the end of w.grad (160 bytes)"
    )
    assert set(by_name) == {"y", "w.grad"}


def overrun(x, w, g):
    dw = torch.empty_like(w)
    torch.as_strided(dw, (2 * len(w),), (1,), dw.storage_offset()).copy_((g[:, None] * x).sum(0).repeat(2))
    return g[:, None] * w, dw


def test_a_stray_read_shows_in_the_results():
    def kernel(x, w):
        wide = torch.as_strided(x, (len(x) + 1, x.shape[1]), x.stride(), x.storage_offset())
        return torch.cat([plain_sum(x, w)[:-1], wide[-1, :1]])

    report = quick(kernel, backward=None)
    (finding,) = report.findings
    assert finding.probe == "guard" and finding.tensor == "y"
    assert finding.text.startswith("y holds memory from outside a buffer: axis T: 11 (to the end); 1 of 12 elements")


# poison


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_differs_from_nan_made_by_arithmetic(dtype):
    with Poison(Arena()):
        fresh = torch.empty(6, dtype=dtype)
        like, new = torch.empty_like(fresh), fresh.new_empty(6)
        strided = torch.empty_strided((2, 3), (3, 1), dtype=dtype)
    for tensor in (fresh, like, new, strided.flatten()):
        assert poison_left(tensor).all() and tensor.isnan().all()
    fresh[:3] = torch.zeros(3, dtype=dtype) / torch.zeros(3, dtype=dtype)
    assert poison_left(fresh).tolist() == [False] * 3 + [True] * 3
    assert poison_left(torch.full((3,), float("nan"), dtype=dtype)) is None
    assert band_read(fresh) is None


@pytest.mark.parametrize("file, count", [("/site-packages/triton/backends/nvidia/driver.py", 0), ("/my/driver.py", 1)])
def test_a_buffer_that_clears_caches_while_triton_tunes_is_not_the_candidates(file, count):
    """All are kept between guard bands: eighteen configurations of 256 MiB each were over a candidate's limit."""
    arena, names = Arena(), {"torch": torch}
    body = "def get_empty_cache_for_benchmark():\n    return torch.empty(1 << 23, dtype=torch.int)"
    exec(compile(body, file, "exec"), names)
    with Poison(arena):
        names["get_empty_cache_for_benchmark"]()
        torch.empty(4)
    assert len(arena.buffers) == count + 1


def test_integers_are_poisoned_with_7f_and_bools_with_one():
    with Poison(Arena()):
        assert torch.empty(2, dtype=torch.int32).tolist() == [0x7F7F7F7F] * 2
        assert torch.empty(2, dtype=torch.bool).tolist() == [True] * 2


def test_a_too_small_grid_is_located_by_its_indices():
    """M08: the kernel stores one stream of n."""

    def half(x, w, g):
        dx = torch.empty_like(x)
        dx[: len(x) // 2] = sum_gradients(x, w, g)[0][: len(x) // 2]
        return dx, sum_gradients(x, w, g)[1]

    (finding,) = quick(autograd(plain_sum, half)).findings
    assert (finding.probe, finding.tensor, finding.location.axes) == ("poison", "x.grad", {"T": [(6, 11)]})
    assert finding.measured == 0.5 and "never written" in finding.text


def test_empty_is_guarded_inside_a_custom_operator_and_its_backward():
    library = torch.library.custom_op("assay_tests::half", mutates_args=())

    @library
    def half(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y[:, ::2] = x[:, ::2]
        return y

    report = quick(lambda x, w: half(x), golden=lambda x, w: x * 1, backward=None)
    assert probes_of(report) == {"poison"} and report.findings[0].location.fraction == 0.5


def test_unreturned_zeros_and_scratch_are_not_judged():
    def kernel(x, w):
        scratch = torch.empty_like(x)
        scratch.copy_(x)
        torch.empty(100)
        return (scratch * w).sum(-1) + torch.zeros(len(x))

    assert quick(kernel, backward=None).ok


# mutation and aliases


def test_an_overwritten_input_is_named():
    def forward(x, w):
        return plain_sum(x, w)

    def scaled_gradient(x, w, g):
        g.mul_(2)
        return sum_gradients(x, w, g / 2)

    def over_saved(x, w, g):
        dx, dw = sum_gradients(x, w, g)
        return x.copy_(dx), dw

    def written_output(x, w):
        x[:, 0] = 0
        return plain_sum(x, w)

    report = quick(autograd(forward, scaled_gradient))
    assert "the output gradient grad_y was modified: 12 of 12 elements (values, by the backward)" in texts(report)
    report = quick(autograd(forward, over_saved))
    assert "the input x was modified: 480 of 480 elements (values, by the backward)" in texts(report)
    report = quick(written_output, backward=None)
    assert "the input x was modified: 12 of 480 elements (values, by the forward)" in texts(report)


def test_a_declared_reuse_of_memory_is_not_a_finding():
    def over_saved(x, w, g):
        dx, dw = sum_gradients(x, w, g)
        return x.copy_(dx), dw

    assert assay.check(target(autograd(plain_sum, over_saved), mutates=("x",))).ok


def test_a_backward_that_overwrites_an_output_is_found():
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y = x * w
            ctx.save_for_backward(x, w)
            ctx.y = y
            return y

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            ctx.y.detach().zero_()
            return g * w, (g * x).sum(0)

    report = quick(Kernel.apply, golden=lambda x, w: x * w)
    assert any(t.startswith("the backward modified y, which the forward returned") for t in texts(report, "alias"))


def test_results_that_share_memory_are_found_unless_the_golden_returns_views_too():
    def two(x, w):
        y = x * w
        return y, y[:, :3]

    def golden(x, w):
        return x * w, (x * w)[:, :3]

    report = quick(two, golden=golden, backward=None)
    assert texts(report, "alias") == ["y0 shares memory with y1: writing one changes the other"]
    assert quick(two, golden=two, backward=None).ok


@pytest.mark.parametrize("make", [torch.zeros, torch.empty])
def test_a_zero_added_beyond_the_end_is_found(make):
    """Like an atomic addition whose mask ends one element too late: NaN + 0 keeps its bits."""

    def kernel(x, w):
        y = make(x.shape).copy_(x * w)
        y.as_strided((y.numel() + 1,), (1,))[-1].add_(0.0)
        return y

    report = assay.check(target(kernel, golden=lambda x, w: x * w, backward=None), raises=False)
    assert any("4 bytes written past the end" in text for text in texts(report, "guard"))


def test_one_shared_gradient_for_both_addends_passes_and_overlapping_ones_fail():
    """Autograd returns one tensor as the gradient of both a and b in a + b."""

    def golden(a, b):
        return a + b * 1  # autograd does not share these gradients

    def overlapping(a, b, grad_y):
        both = torch.empty(len(a) + 1, *a.shape[1:])
        both[1:], both[:-1] = grad_y, grad_y
        return both[1:], both[:-1]

    cases = {"a": torch.randn(5, 8), "b": torch.randn(5, 8)}
    alike = {"autograd": "auto", "one": lambda a, b, grad_y: (grad_y, grad_y)}
    for backward in alike.values():
        assert assay.check(assay.Target(torch.add, golden, cases=cases, backward=backward)).verdict == "pass"
    report = assay.check(assay.Target(torch.add, golden, cases=cases, backward=overlapping), raises=False)
    assert "a.grad shares memory with b.grad: writing one changes the other" in texts(report, "alias")


def test_overlap_is_exact_for_interleaved_views():
    base = torch.zeros(4, 6)
    assert overlap(base[:, :3], base[:, 2:4]) and overlap(base, base[1, 1:2])
    assert not overlap(base[:, ::2], base[:, 1::2]) and not overlap(base[:2], base[2:])
    assert not overlap(base, base.clone()) and not overlap(base[:0], base)


# layouts


def test_layouts_hold_the_same_values_under_other_strides():
    value = torch.arange(24.0).view(2, 3, 4)
    for layout in (*memory.LAYOUTS, "contiguous"):
        placed = Arena().place("x", value, layout)
        assert torch.equal(placed, value)
    assert strides_for(value, "transposed") == ((12, 1, 3), 0)
    assert strides_for(value, "stepped") == ((24, 8, 2), 0)
    assert strides_for(value, "sliced") == ((30, 10, 1), 1)
    assert strides_for(value[0, 0], "sliced") == ((1,), 1) and strides_for(value[:0], "sliced") == ((12, 4, 1), 0)
    with pytest.raises(ValueError, match="unknown layout 'diagonal'; known: transposed, stepped, sliced"):
        strides_for(value, "diagonal")


def dense(t):
    """The elements that a kernel reads if it treats every tensor as contiguous."""
    return torch.as_strided(t, t.shape, torch.empty(t.shape).stride(), t.storage_offset())


def padded_rows_only(t):
    """A kernel that checks for a dense last axis, and then treats the rows as dense too."""
    return dense(t) if t.stride(-1) == 1 else t


LAYOUT_FAULTS = {
    "inputs read as dense": (lambda x, w: plain_sum(dense(x), w), None, "x"),
    "rows taken for dense": (lambda x, w: plain_sum(padded_rows_only(x), w), None, "x"),
    "a transposed gradient read as dense": (None, lambda x, w, g: (dense(g) * w, (dense(g) * x).sum(0)), "grad_y"),
    "an expanded gradient read as dense": (
        None, lambda x, w, g: (g * w, ((dense(g) if 0 in g.stride() else g) * x).sum(0)), "stride0(grad_y)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
def test_layouts_name_the_tensor_that_matters(fault):
    forward, backward, name = LAYOUT_FAULTS[fault]
    if backward is None:
        one = target(forward, backward=None)
    else:
        one = target(autograd(lambda x, w: x * w, backward), golden=lambda x, w: x * w)
    report = assay.check(one, probes=["quick", "layouts"], raises=False)
    runs = {r.run for r in report.rows if r.state == "bad"}
    assert not report.ok and runs and all(run.startswith("layout:") and name in run for run in runs), str(report)


def test_a_declared_refusal_of_layouts_is_checked():
    def refuses(x, w):
        if not (x.is_contiguous() and w.is_contiguous()):
            raise ValueError("x and w must be contiguous")
        return plain_sum(x, w)

    def pretends(x, w):
        return plain_sum(dense(x), w)

    report = assay.check(target(refuses, layouts="contiguous"))
    assert {(n.id, n.tensor) for n in report.notes} == {("refused_layout", "x, w"), ("refused_layout", "x")}
    report = assay.check(target(pretends, layouts="contiguous", backward=None), raises=False)
    assert not report.ok and any(r.run.startswith("layout:") and r.state == "bad" for r in report.rows)
    report = assay.check(target(refuses), raises=False)
    message = "the candidate raised in its forward (layout:transposed(x)): ValueError: x and w must be contiguous ("
    assert any(text.startswith(message) for text in texts(report))


def test_a_refused_output_gradient_is_never_accepted():
    def strict(x, w, g):
        if not g.is_contiguous():
            raise RuntimeError("dense gradients only")
        return sum_gradients(x, w, g)

    report = assay.check(target(autograd(plain_sum, strict), layouts="contiguous"), raises=False)
    assert not report.ok and all("dense gradients only" in t for t in texts(report))
