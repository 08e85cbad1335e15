"""PackedExperts as an object: properties, repr, copies, pickles and slices."""

import copy
import ctypes
import gc
import io
import pickle
import platform
import weakref

import pytest
import torch

from goldsmith.experts import PackedExperts, moe, pack
from goldsmith.experts.packed import memory, quantisation
from goldsmith.experts.packed.formats import FORMATS

E, H, I = 2, 64, 160
GROUPS = {"int4": 32, "int4_asym": 16, "int8": 8}


def base_of(format="int4", partitions=1, H=H, I=I, **options):
    generator = torch.Generator().manual_seed(3)
    both, down = (torch.randn(s, generator=generator) for s in ((E, 2 * I, H), (E, H, I)))
    return pack(both, down, format=format, partitions=partitions, group_size=GROUPS.get(format), **options)


def same(a, b):
    ours, theirs = ((x.gate_up, x.down, x.gate_up_bias, x.down_bias) for x in (a, b))
    return a.layout == b.layout and all(x is y or torch.equal(x, y) for x, y in zip(ours, theirs))


def test_properties():
    base = base_of("int4", gate_up_bias=torch.zeros(E, 2 * I))
    assert (base.num_experts, base.hidden_size, base.intermediate_size) == (E, H, I)
    assert (base.format, base.group_size, base.scale_dtype) == ("int4", 32, torch.bfloat16)
    assert (base.partitions, base.has_bias, base.device, base.nodes) == (1, True, torch.device("cpu"), ())
    assert base.gate_up.dtype == base.down.dtype == torch.uint8 and base.gate_up.dim() == 1


def test_the_repr_has_sizes_and_bytes():
    assert repr(base_of()) == (
        "PackedExperts(int4, group_size=32, num_experts=2, hidden_size=64, intermediate_size=160, 61.4 kB)"
    )
    with_bias = base_of("fp8_block", 3, down_bias=torch.zeros(E, H))
    assert "fp8_block, num_experts=2" in repr(with_bias) and "partitions=3, with biases, 82.4 kB)" in repr(with_bias)
    assert repr(pack(torch.ones(1, 2, 1), torch.ones(1, 1, 1))).endswith("intermediate_size=1, 3.1 kB)")


def test_a_base_is_immutable():
    base = base_of()
    for name in ("format", "gate_up", "layout", "anything"):
        with pytest.raises(AttributeError, match=f"immutable: {name} "):
            setattr(base, name, 1)
    with pytest.raises(AttributeError, match="immutable: down"):
        del base.down
    with pytest.raises(TypeError, match="use experts.pack, an importer"):
        PackedExperts(1, 2)


def test_copies_share_the_weights_and_pickles_keep_every_bit():
    base = base_of("int4_asym", 3, gate_up_bias=torch.randn(E, 2 * I), down_bias=torch.randn(E, H))
    module = torch.nn.Module()
    module.base = base
    assert copy.deepcopy(base) is base and copy.copy(base) is base and copy.deepcopy(module).base is base
    again = pickle.loads(pickle.dumps(base))
    assert same(again, base) and again.nodes == base.nodes and again.gate_up.data_ptr() != base.gate_up.data_ptr()
    buffer = io.BytesIO()
    torch.save(base, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=False), base)


def test_the_memory_is_freed_when_nothing_refers_to_it():
    base = base_of()
    alive = weakref.ref(base)
    assert base.gate_up.data_ptr() % 64 == base.down.data_ptr() % 64 == 0
    blob = base.gate_up
    kept = blob.clone()
    del base
    gc.collect()
    assert alive() is None and torch.equal(blob, kept)  # a reference to a blob keeps its pages


def test_a_base_packed_in_inference_mode_works_in_training(tmp_path):
    with torch.inference_mode():
        base = base_of("int4", gate_up_bias=torch.zeros(E, 2 * I), down_bias=torch.zeros(E, H))
        base.save(tmp_path / "f")
        others = [base.partition(2), PackedExperts.load(tmp_path / "f"), base_of("bf16")]
    for each in (base, *others):
        x = torch.randn(3, H, requires_grad=True)
        ids, weights = torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
        moe(x, ids, weights, each, backend="reference").sum().backward()
        assert x.grad.isfinite().all() and not each.gate_up.is_inference()


def test_a_packed_base_is_traced_into_one_graph():
    base, ids, weights = base_of("int4", 2), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    results = []
    for call in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-1, 1, 3 * H).view(3, H).requires_grad_()
        y = call(x, ids, weights, base, backend="reference")
        y.sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_torchs_default_device_does_not_affect_packing():
    wanted = base_of("mxfp4", down_bias=torch.zeros(E, H))
    both, down, bias = (t.clone() for t in (*wanted.unpack(), wanted.down_bias))
    with torch.device("meta"):
        base = pack(both, down, format="mxfp4", down_bias=bias)
        assert same(base, wanted) and base.unpack()[0].device.type == "cpu"


def test_moving_to_another_device_gives_another_base():
    base = base_of(down_bias=torch.zeros(E, H))
    assert base.to("cpu") is base
    there = base.to("meta")
    assert there.device.type == "meta" and there.down_bias.is_meta and "meta" in repr(there) and there is not base


@pytest.mark.parametrize("wrong", [torch.int8, torch.float8_e4m3fn, "float32"])
def test_unpack_refuses_dtypes_other_than_floats(wrong):
    with pytest.raises(TypeError, match="unpack: dtype=.*expected torch.float32"):
        base_of().unpack(wrong)


# -- slices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 40])
def test_any_number_of_slices_has_the_same_weights(format, partitions):
    whole = base_of(format)
    sliced = base_of(format, partitions)
    assert sliced.partitions == partitions and len(sliced.nodes) == (partitions if partitions > 1 else 0)
    for value in (sliced, whole.partition(partitions), base_of(format, 5).partition(partitions)):
        assert all(torch.equal(a, b) for a, b in zip(value.unpack(), whole.unpack()))
        assert value.layout == sliced.layout and torch.equal(value.gate_up, sliced.gate_up)
    assert same(sliced.partition(1), whole) and sliced.partition(partitions) is sliced


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_autocast_changes_nothing(format, dtype, tmp_path, monkeypatch):
    """On a CPU autocast cannot concatenate float16: scales of int4_asym in slices and chunks, and biases."""
    monkeypatch.setattr(quantisation, "_CHUNK", 128 * H)
    biases = {"gate_up_bias": [torch.ones(2 * I).half()] * E, "down_bias": torch.ones(E, H).half()}

    def results():
        base = base_of(format, 3, **biases, interleaved=True)
        base.save(path)
        again = PackedExperts.load(path, partitions=2)
        x, ids, w = torch.full((3, H), 0.5), torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.25)
        return base, again, base.partition(2), base.unpack(), moe(x, ids, w, again), path.read_bytes()

    path = tmp_path / "base"
    wanted = results()
    with torch.autocast("cpu", dtype=dtype):
        under_autocast = results()
    assert all(same(a, b) for a, b in zip(under_autocast[:3], wanted[:3])) and under_autocast[5] == wanted[5]
    tensors = zip((*under_autocast[3], under_autocast[4]), (*wanted[3], wanted[4]))
    assert all(torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize(
    ("format", "I", "N", "cuts"),
    [
        ("int4", 2048, 3, (0, 704, 1376, 2048)),
        ("int4", 64, 5, (0, 32, 64, 64, 64, 64)),
        ("fp8_block", 300, 2, (0, 256, 300)),
        ("mxfp4", 96, 2, (0, 64, 96)),
        ("bf16", 100, 3, (0, 48, 80, 100)),
        ("bf16", 5, 3, (0, 2, 4, 5)),
        ("bf16", 2, 3, (0, 1, 2, 2)),
        ("int8", 128, 3, (0, 48, 88, 128)),
    ],
)
def test_slices_are_cut_at_groups_and_the_first_ones_are_longer(format, I, N, cuts):
    base = base_of(format, I=I)
    assert base.partition(N).layout.cuts == cuts
    for which in ("gate_up", "down"):
        for place in base.partition(N).layout.matrices(which):
            assert place.offset % 4096 == 0


def test_a_scale_of_the_whole_row_is_the_same_in_every_slice():
    both, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    whole = pack(both, down, format="int8")
    sliced = pack(both, down, format="int8", partitions=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.unpack(), sliced.unpack()))


def test_partition_keeps_the_biases():
    base = base_of("bf16", gate_up_bias=torch.randn(E, 2 * I))
    assert base.partition(3).gate_up_bias is base.gate_up_bias


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_slices_go_to_the_requested_nodes():
    node = memory.nodes_of_machine()[0]
    base = base_of("int4", 1).partition(3, nodes=[node] * 3)
    assert base.nodes == (node,) * 3 and same(base, base_of("int4", 3))
    assert base_of("int4", 1).partition(1, nodes=[node]).nodes == (node,)


def test_neighbouring_slices_share_a_node(monkeypatch):
    monkeypatch.setattr(memory, "nodes_of_machine", lambda: [0, 2])
    assert memory.spread(5) == (0, 0, 0, 2, 2) and memory.spread(2) == (0, 2)


@pytest.mark.parametrize(
    ("partitions", "nodes", "error", "says"),
    [
        (0, None, ValueError, "PackedExperts.partition: partitions=0, expected a whole number of at least 1"),
        (1, 0, TypeError, "nodes=0 is an int, expected a list with a node for each slice"),
        (65537, None, ValueError, "partitions=65537, expected at most 65536"),
        (1, [0.0], TypeError, "nodes=[0.0] holds a float, expected the number of a node"),
        (1, [False], TypeError, "nodes=[False] holds a bool, expected the number of a node"),
        (2, [0], ValueError, "nodes=[0] has 1 entries, expected one for each of 2 slices"),
        (2, [0, 999], ValueError, "nodes=[0, 999]: this machine has no node 999; it has ["),
        (True, None, TypeError, "partitions=True is a bool"),
    ],
)
def test_wrong_partitions_and_nodes_are_refused(partitions, nodes, error, says):
    with pytest.raises(error) as raised:
        base_of().partition(partitions, nodes)
    assert says in str(raised.value)


@pytest.mark.parametrize("refused", [False, True], ids=["bound", "touched"])
def test_pages_are_placed_on_a_node_before_they_are_written(monkeypatch, refused):
    """Asks the kernel for the policy if it allows binding; otherwise a thread on the node writes every page."""
    if refused:
        monkeypatch.setattr(memory, "_bind", lambda pages, node: False)
    pages, others = memory.empty_pages(3 << 20), memory.empty_pages(3 << 20)
    node = memory.nodes_of_machine()[0]
    how = memory.put_on_node(pages, node)
    assert not pages.any()
    calls = {"x86_64": (237, 239), "aarch64": (235, 236)}[platform.machine()]  # mbind, get_mempolicy
    libc, mask, here = (
        ctypes.CDLL(None),
        (ctypes.c_ulong * 16)(),
        [ctypes.c_void_p(t.data_ptr()) for t in (pages, others)],
    )
    mask[node // 64] = 1 << node % 64
    size, bits = ctypes.c_ulong(others.numel()), ctypes.c_ulong(1024)
    allowed = libc.syscall(calls[0], here[1], size, 1, mask, bits, 0) == 0
    assert how == ("bound" if allowed and not refused else "touched")
    if how == "bound":
        mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
        assert libc.syscall(calls[1], ctypes.byref(mode), nodes, bits, here[0], ctypes.c_ulong(2)) == 0
        assert mode.value == 1 and list(nodes) == list(mask)


def test_the_error_for_missing_memory_names_its_size_and_purpose():
    with pytest.raises(MemoryError, match="could not provide .* GB for packed weights"):
        memory.empty_pages(1 << 60)
