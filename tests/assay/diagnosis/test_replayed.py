"""A run that resumes at the changed operator gives the result of a whole run, bit for bit."""

import pytest
import torch

from assay.diagnosis.targets import session_of
from goldsmith import assay
from goldsmith.assay.diagnosis.graph.golden import Golden
from goldsmith.assay.diagnosis.graph.recording import Listening, writes
from goldsmith.assay.diagnosis.graph.replay import Unknown, taped

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[5], D=[6], E=[3])
def rows(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(D, D), "ids": make.integers(0, E, T), "scale": make.normal(E)}


def plain(x, w, ids, scale):
    h = assay.stage("h", torch.tanh(x @ w))
    return torch.softmax(h * scale[ids][:, None], -1)


def in_place(x, w, ids, scale):
    sums = torch.zeros_like(x)
    sums += x
    state = x[:, 0] * 0
    for t in range(x.shape[1]):
        state = state * 0.5 + x[:, t]
        sums[:, t].mul_(2).add_(state)
    out = sums.t().contiguous()
    out[0].copy_(x[:, 0] + state)
    return out.t() @ w + scale[ids][:, None]


def of_parts(x, w, ids, scale):
    left, right = (x @ w).chunk(2, -1)
    values, places = torch.sort(torch.cat([left * 2, right]), dim=-1)
    return torch.stack([values.amax(-1), values.gather(-1, places).sum(-1)]) + (scale[ids] * 0).sum()


def with_result(change):
    """A change that replaces the operator's result y by change(y)."""

    def run(func, args, kwargs):
        out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            return out
        return out.copy_(change(out)) if writes(func) else change(out)

    return run


def twice(out):
    return out * 2 if out.is_floating_point() else out


def turned(out):
    return torch.empty_like(out).copy_(out.flip(-1)) if out.dim() else out


def laid_otherwise(out):
    return out.sin().t().contiguous().t() if out.dim() == 2 and out.is_floating_point() else out


def both(golden, tensor, change):
    """Of every operator that was changed: what the replay makes, or Unknown, and what a whole run makes."""
    target = assay.Target(lambda x, w, ids, scale: 1.01 * golden(x, w, ids, scale), golden, cases=rows)
    ref = session_of(target).ref
    run = Golden(ref)
    replay = taped(lambda mode: run.run_under(mode, ref.leaves, tensor), tensor)
    count = Listening()
    run.run_under(count, ref.leaves, tensor)
    for index in range(count.count):
        changes = {index: change}
        try:
            whole = run.run_under(Listening(changes), ref.leaves, tensor)[tensor]
        except RuntimeError:
            continue
        try:
            yield replay.value(changes, {}), whole
        except Unknown:
            yield None, whole


@pytest.mark.parametrize("tensor", ["y", "x.grad", "w.grad"])
@pytest.mark.parametrize("change", [twice, turned])
@pytest.mark.parametrize("golden", [plain, in_place, of_parts])
def test_a_partial_run_gives_the_same_result_as_a_whole_run(golden, change, tensor):
    result = list(both(golden, tensor, with_result(change)))
    compared = [(replayed, whole) for replayed, whole in result if replayed is not None]
    assert len(compared) > len(result) // 3
    assert all(torch.equal(replayed.nan_to_num(), whole.nan_to_num()) for replayed, whole in compared)
    assert len({tuple(whole.flatten().tolist()) for _, whole in compared}) > 2, "the changes change something"


def test_a_changed_layout_gives_the_same_result_as_a_whole_run():
    def each(x, w, ids, scale):
        h = torch.tanh(x.t() * 2).t() * scale[ids][:, None]
        return h.view(-1, 2, 3).flip(1).reshape(x.shape) + w.sum() * 0

    result = list(both(each, "y", with_result(laid_otherwise)))
    compared = [(replayed, whole) for replayed, whole in result if replayed is not None]
    assert len(compared) > 3 and all(torch.equal(replayed, whole) for replayed, whole in compared)


@pytest.mark.parametrize("golden", [plain, in_place])
def test_changed_inputs_give_the_same_result_as_a_whole_run(golden):
    target = assay.Target(golden, golden, cases=rows)
    ref = session_of(target).ref
    run = Golden(ref)
    replay = taped(lambda mode: run.run_under(mode, ref.leaves, "w.grad"), "w.grad")
    for name in ("x", "w", "scale", "grad_y"):
        other = {name: ref.leaves[name] * 3}
        assert torch.equal(replay.value({}, other), run.run_under(Listening(), {**ref.leaves, **other})["w.grad"]), name
    with pytest.raises(Unknown):  # the golden's Python may go by them
        replay.value({}, {"ids": ref.leaves["ids"].flip(0)})
    with pytest.raises(Unknown):
        replay.value({}, {"x": ref.leaves["x"][:3]})


def gated(x, w, ids, scale):
    """Reads in its backward what is gathered, a view, what was written in place, and parts of one memory."""
    h = x @ w
    h = h.mul_(scale[ids][:, None]) * torch.sigmoid(h)
    left, right = (h * h.exp()).chunk(2, -1)
    return torch.cat([left * right, (h.t() * x.t()).t().tanh()], -1)


@pytest.mark.parametrize("tensor", ["x.grad", "w.grad", "scale.grad"])
@pytest.mark.parametrize("new", [lambda t: t * 3, lambda t: t.flip(0)])
@pytest.mark.parametrize("golden", [plain, in_place, gated])
def test_tensors_that_the_backward_reads_wrongly(golden, new, tensor):
    target = assay.Target(golden, golden, cases=rows)
    ref = session_of(target).ref
    run, listening = Golden(ref), Listening().record()
    own = run.run_under(listening, ref.leaves, tensor)[tensor]
    replay = taped(lambda mode: run.run_under(mode, ref.leaves, tensor), tensor)
    compared = changed = 0
    for key in {**ref.leaves, **{call.index: call for call in listening.calls if not call.backward}}:

        def saved(tensors, key=key):
            return (
                {key: new(tensors[key]).contiguous()} if key in tensors and tensors[key].dtype == torch.float64 else {}
            )

        whole = run.run_under(Listening(saved=saved), ref.leaves, tensor)[tensor]
        try:
            assert torch.equal(replay.value({}, {}, saved), whole), key
            compared, changed = compared + 1, changed + (not torch.equal(whole, own))
        except Unknown:
            continue
    assert compared > 5 and (changed or tensor == "scale.grad")
    with pytest.raises(Unknown):
        replay.value({}, {"x": ref.leaves["x"] * 2}, lambda tensors: {})


def test_values_that_python_reads_need_a_whole_run():
    def by_size(x, w, ids, scale):
        h = x @ w
        return h * 2 if float(h.detach().sum()) > 0 else h * 3

    def by_number(x, w, ids, scale):
        largest = (x @ w).amax().item()
        return x / largest + scale[ids][:, None]

    def of_counts(x, w, ids, scale):
        return x[((x @ w).argmax(-1) % 3).tolist()] + (w * scale[ids[0]]).sum()

    for golden in (by_size, by_number, of_counts):
        target = assay.Target(golden, golden, cases=rows, backward=None)
        ref = session_of(target).ref
        run = Golden(ref)
        names = Listening().record()
        run.run_under(names, ref.leaves, "y")
        index = next(call.index for call in names.calls if call.name == "mm")
        replay = taped(lambda mode, run=run, ref=ref: run.run_under(mode, ref.leaves, "y"), "y")
        with pytest.raises(Unknown):
            replay.value({index: with_result(lambda out: -out)}, {})


@pytest.mark.gpu
@pytest.mark.parametrize("golden", [plain, in_place, of_parts])
def test_on_a_gpu(golden):
    target = assay.Target(lambda x, w, ids, scale: 1.01 * golden(x, w, ids, scale), golden, cases=rows)
    ref = session_of(target, device="cuda").ref
    run = Golden(ref)
    replay = taped(lambda mode: run.run_under(mode, ref.leaves, "y"), "y")
    other = {"x": ref.leaves["x"] * 3}
    assert torch.equal(replay.value({}, other), run.run_under(Listening(), {**ref.leaves, **other}, "y")["y"])
