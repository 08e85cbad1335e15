"""PackedExperts.from_blocks: experts in memory that the caller owns, for example a mapped file."""

import mmap
import pickle
import warnings

import pytest
import torch

from goldsmith import ShapeError
from goldsmith.experts import PackedExperts, moe, pack, slots
from goldsmith.experts.packed.formats import FORMATS

E, H, I, T, K = 3, 64, 96, 5, 2


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def packed(format="int4", **options):
    return pack(torch.randn(E, 2 * I, H), torch.randn(E, H, I), format=format, **groups(format), **options)


def groups(format):
    return {"group_size": 32} if format.startswith("int4") else {}


def blocks_of(base, more=0):
    """Rows of whole pages, as in a store, whose padding has values that must not be read."""
    one = base.block(0).numel()
    rows = torch.full((E, -(-(one + more) // 4096) * 4096), 255, dtype=torch.uint8)
    for e in range(E):
        rows[e, :one] = base.block(e)
    return rows


def again(base, rows, **biases):
    sizes = dict(hidden_size=H, intermediate_size=I, format=base.format, scale_dtype=base.scale_dtype)
    return PackedExperts.from_blocks(rows, **sizes, **groups(base.format), **biases)


def call():
    ids = torch.rand(T, E).topk(K).indices
    ids[1, 0] = -1
    return torch.randn(T, H).bfloat16(), ids


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_give_the_same_results_as_the_packed_base_bit_for_bit(format):
    base = packed(format)
    there = again(base, blocks_of(base))
    for a, b in zip(base.unpack(), there.unpack()):
        assert torch.equal(a, b)
    x, ids = call()
    assert torch.equal(slots(x, ids, base), slots(x, ids, there))
    weights = torch.rand(T, K)
    gradients = []
    for one in (base, there):
        leaf = x.clone().requires_grad_()
        y = moe(leaf, ids, weights, one)
        y.float().square().sum().backward()
        gradients.append((y.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_reference_reads_blocks_too():
    base = packed()
    x, ids = call()
    wanted = slots(x, ids, base, backend="reference")
    assert torch.equal(slots(x, ids, again(base, blocks_of(base)), backend="reference"), wanted)


def test_nothing_is_copied():
    base = packed("bf16")
    rows = blocks_of(base)
    there = again(base, rows)
    assert there.gate_up.data_ptr() == there.down.data_ptr() == rows.data_ptr()
    assert there.nbytes == rows.nbytes


def test_biases_may_be_views_of_the_blocks(format="bf16"):
    base = packed(format, gate_up_bias=torch.randn(E, 2 * I), down_bias=torch.randn(E, H))
    rows, at = blocks_of(base, 4 * (2 * I + H)), base.block(0).numel()
    rows[:, at : at + 8 * I] = base.gate_up_bias.view(torch.uint8)
    rows[:, at + 8 * I : at + 8 * I + 4 * H] = base.down_bias.view(torch.uint8)
    biases = rows[:, at : at + 8 * I + 4 * H].view(torch.float32)
    there = again(base, rows, gate_up_bias=biases[:, : 2 * I], down_bias=biases[:, 2 * I :])
    x, ids = call()
    assert torch.equal(slots(x, ids, there), slots(x, ids, base))


def test_a_file_mapped_read_only_is_used_in_place(tmp_path):
    base = packed("mxfp4")
    path = tmp_path / "experts"
    path.write_bytes(b"\0" * 4096 + blocks_of(base).numpy().tobytes())
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        rows = torch.frombuffer(pages, dtype=torch.uint8)[4096:].view(E, -1)
    x, ids = call()
    out, flags = torch.full((T, K, H), torch.nan), torch.full((T, K), 7, dtype=torch.uint8)
    with torch.inference_mode():
        assert slots(x, ids, again(base, rows), out=out, flags=flags) is out
    assert torch.equal(out, slots(x, ids, base)) and not flags.any()


def test_blocks_of_some_experts_give_the_rows_of_those_experts():
    base = packed()
    rows = blocks_of(base)
    x, ids = call()
    moved = torch.where(ids >= 1, ids - 1, -1)
    results = slots(x, moved, again(base, rows[1:]))
    assert torch.equal(results, slots(x, torch.where(ids >= 1, ids, -1), base))


def test_slices_copies_and_pickles_have_the_same_weights():
    base = packed()
    there = again(base, blocks_of(base))
    x, ids = call()
    wanted = slots(x, ids, base)
    kept = pickle.loads(pickle.dumps(there))
    assert kept.layout == there.layout and torch.equal(slots(x, ids, kept), wanted)
    whole = there.partition(1)
    assert whole.layout == base.layout and torch.equal(whole.gate_up, base.gate_up)
    assert torch.equal(there.partition(2).gate_up, base.partition(2).gate_up)
    assert torch.equal(there.block(2), base.block(2))


def test_saving_blocks_writes_the_same_file_as_saving_the_base(tmp_path):
    base = packed()
    base.save(tmp_path / "a")
    again(base, blocks_of(base)).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


WRONG = {
    "short": (lambda rows: rows[:, :64].contiguous(), ShapeError, r"blocks is \[3, 64\], expected \[E, bytes\], bytes"),
    "flat": (lambda rows: rows.view(-1), ShapeError, r"expected \[E, bytes\]"),
    "odd": (lambda rows: rows[:, :-8].contiguous(), ShapeError, "a multiple of 64"),
    "apart": (lambda rows: rows[::2], ValueError, "blocks is not contiguous"),
    "dtype": (lambda rows: rows.view(torch.int8), TypeError, "blocks is int8, expected one of: uint8"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, kind, text", WRONG.values(), ids=list(WRONG))
def test_blocks_of_a_wrong_shape_or_dtype_are_refused(wrong, kind, text):
    base = packed()
    with pytest.raises(kind, match=text):
        again(base, wrong(blocks_of(base)))


def test_block_refuses_an_expert_out_of_range():
    base = packed()
    with pytest.raises(IndexError, match=r"expert=3, expected 0..2"):
        base.block(3)
    with pytest.raises(TypeError, match="expert=True is of type bool"):
        base.block(True)
    with pytest.raises(ValueError, match=r"this base has 2 slices; use base.partition\(1\)"):
        base.partition(2).block(0)
