"""Sources of several kinds: mixed dtypes and codes, layers out of order; what the key of a store covers."""

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from experts.defaults import check
from goldsmith import ShapeError, experts
from goldsmith.offload import ExpertStore
from goldsmith.offload.store import source_key, writer
from goldsmith.offload.store.source import FloatExpert, coded
from offload.stores import weights


def packed(format, seed=0):
    layer = weights(seed=seed)
    return experts.pack(layer["gate_up"], layer["down"], format=format)


def test_the_format_covers_all_matrices_and_the_source_dtype_is_the_widest(tmp_path):
    mixed = weights() | {"down": weights(dtype=torch.float32)["down"]}
    with ExpertStore.build({0: mixed}, tmp_path / "s") as store:
        assert (store.format, store.dtype, store.exact) == ("fp32", torch.float32, True)
        assert torch.equal(store.dequantize(0, 2)["down"], mixed["down"][2])
    later = {0: weights(), 1: weights(dtype=torch.float16)}
    with ExpertStore.build(later, tmp_path / "t", format="fp32") as store:
        assert store.dtype == torch.float32  # which holds both bfloat16 and float16


@pytest.mark.parametrize("first, second, text", [
    ("int4", "mxfp4", "has codes of mxfp4 in .*, but the first layer has codes of int4 in groups of 32 with scales in"),
    ("int4", None, "has plain weights, but the layers before it have codes"),
    (None, "int4", "has codes of int4 in groups of 32 .*, but the first layer has plain weights"),
], ids=["other codes", "plain after codes", "codes after plain"])  # fmt: skip
def test_a_store_has_one_format(tmp_path, first, second, text):
    source = {i: weights() if kind is None else packed(kind) for i, kind in enumerate((first, second))}
    with pytest.raises(ValueError, match=f"layer 1: {text}"):
        ExpertStore.build(source, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    same = {i: packed(first, seed=i) if first else weights(seed=i) for i in range(2)}
    ExpertStore.build(same, tmp_path / "s").close()


def test_codes_of_another_format_are_refused_before_they_are_read(tmp_path):
    def read(number):
        raise AssertionError(f"expert {number} was read")

    source = {0: packed("int4"), 1: replace(coded(packed("mxfp4")), read=read)}
    with pytest.raises(ValueError, match="layer 1: has codes of mxfp4"):
        ExpertStore.build(source, tmp_path / "s")


def test_a_layer_without_experts_is_refused(tmp_path):
    for empty in ({"gate_up": iter(()), "down": iter(())}, {"gate_up": torch.zeros(0, 4, 2), "down": []}):
        with pytest.raises(ShapeError, match="layer 1.*: gate_up has no experts, expected at least 1"):
            ExpertStore.build([(0, weights()), (1, empty), (2, weights())], tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_layers_of_a_checkpoint_are_in_the_order_of_their_numbers(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {}
    for layer in (10, 2, 1):
        for name, tensor in weights(seed=layer, E=2).items():
            tensors[f"model.layers.{layer}.mlp.experts.{name}_proj"] = tensor
    save_file(tensors, folder / "model.safetensors")
    with ExpertStore.build(folder, tmp_path / "s") as store:
        assert store.layers == (1, 2, 10)
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="layer 2 has both fused and separate experts"):
        ExpertStore.build(folder, tmp_path / "t")


def test_progress_has_no_total_once_the_source_exceeds_the_estimate(tmp_path):
    messages = []
    more = weights(E=5, seed=1)
    source = {0: weights(E=2), 1: {name: iter(tensor) for name, tensor in more.items()}}
    ExpertStore.build(source, tmp_path / "s", progress=lambda *what: messages.append(what)).close()
    totals = [total for _, total, _ in messages]
    assert len(messages) == 7 and set(totals[:4]) == {messages[3][0]}  # two layers of two, according to the estimate
    assert totals[4:] == [None] * 3


def key(source, **options):
    recipe = {"format": "auto", "group_size": None, "activation": "silu", "alpha": 1.702, "limit": None} | options
    return source_key.fingerprint_and_key("test", source, recipe, whole=True)[1]


def test_the_key_covers_every_piece_of_a_large_matrix():
    """Pieces of 1 MiB are hashed on several threads: a changed number in the last piece gives another key."""
    big = {"gate_up": torch.zeros(1, 1024, 1024), "down": torch.zeros(1, 1024, 512)}  # 4 MiB and 2 MiB
    seen = {key({0: big})}
    for name, at in (("gate_up", (0, 1000, 3)), ("gate_up", (0, 300, 900)), ("down", (0, 1020, 5))):
        edited = {**big, name: big[name].clone()}
        edited[name][at] = 1.0
        seen.add(key({0: edited}))
    assert len(seen) == 4
    pieces = source_key._pieces(memoryview(bytes(2_400_000)))
    assert [len(piece) for piece in pieces] == [2**20, 2**20, 2_400_000 - 2**21]


def test_the_key_covers_dtypes_and_the_borders_between_tensors():
    zeros = {"gate_up": torch.zeros(1, 8, 4), "down": torch.zeros(1, 4, 4)}
    keys = [key({0: {name: t.to(dtype) for name, t in zeros.items()}}, format="fp32")
            for dtype in (torch.float16, torch.bfloat16, torch.float32)]  # fmt: skip
    assert len(set(keys)) == 3  # the store's header names the dtype: it is another store
    parts = list(
        source_key.parts_of(FloatExpert(*(torch.zeros(2, 2) for _ in range(3)), {"down_bias": torch.zeros(2)}))
    )
    assert [tuple(part.shape) for part in parts] == [(2, 2)] * 3 + [(2,)]


def test_torch_defaults_change_nothing(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"model.layers.0.mlp.experts.{name}_proj": tensor for name, tensor in weights(E=2).items()}
    save_file(tensors, folder / "model.safetensors")
    number = itertools.count()

    def work(_):
        with ExpertStore.build(folder, tmp_path / str(next(number))) as store:
            return store.format, store.dequantize(0, 1)

    check(work)


def test_threads_and_the_version_without_the_native_library_write_the_same_store(tmp_path, monkeypatch):
    layers = {n: weights(E=9, seed=n, bias=True) for n in (3, 1)}
    source = {n: experts.pack(**layer, format="int4") for n, layer in layers.items()}
    stores = []
    messages = []
    for threads in (1, 5, 2):
        monkeypatch.setattr(writer, "worth", lambda threads=threads: threads)
        if threads == 2:
            monkeypatch.setattr("goldsmith.experts.packed.panels.reason", lambda: "not built")
        ExpertStore.build(
            source, tmp_path / "s", overwrite=True, progress=lambda *what: messages.append(what[2])
        ).close()
        stores.append((tmp_path / "s").read_bytes())
    assert stores[0] == stores[1] == stores[2]
    assert messages == 3 * [f"writing layer {layer}, expert {e}" for layer in (3, 1) for e in range(9)]


def test_an_expert_that_fails_in_a_thread_ends_the_build(tmp_path, monkeypatch):
    source, plain = {0: packed("int4")}, writer.samples.digest
    asked = []

    def digest(expert):
        asked.append(expert)
        if len(asked) == 4:
            raise MemoryError("no room")
        return plain(expert)

    monkeypatch.setattr(writer.samples, "digest", digest)
    with pytest.raises(MemoryError, match="no room"):
        ExpertStore.build(source, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
