"""The key, the samples and the store of a GGUF file's experts, and its dense part on several threads."""

import numpy as np
import pytest
import torch

from hf import gguf_files
from hf.gguf_files import Type

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from goldsmith.hf.checkpoint.gguf import blocks
from goldsmith.hf.checkpoint.gguf.layer import GgufLayer
from goldsmith.hf.checkpoint.opening import open_checkpoint
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.hf.offload.weights import coded_experts
from goldsmith.offload import from_pretrained
from goldsmith.offload.store.samples import sampled_rows
from goldsmith.offload.store.source_key import fingerprint_and_key
from hf.test_gguf import KEPT, on_meta, write_gguf

RECIPE = {"format": "auto", "group_size": None, "activation": "silu", "alpha": 1.702, "limit": None}
TWO = {"num_hidden_layers": 2}


def source_of(file):
    model = on_meta(file)
    checkpoint = open_checkpoint(file, model)
    return {n: coded_experts(checkpoint.experts(path, spec_of(module)))
            for n, (path, module) in enumerate(experts_modules(model))}  # fmt: skip


def keys(file):
    """(fingerprint from the sample, key of the sample, key of every byte)"""
    source = source_of(file)
    fingerprint, sampled = fingerprint_and_key("test", source, RECIPE, whole=False)
    again, whole = fingerprint_and_key("test", source, RECIPE, whole=True)
    assert again == fingerprint
    return fingerprint, sampled, whole


def flipped(file, layer, projection, expert, row, at):
    """Changes one bit of a matrix in the file; the same call changes it back."""
    reader = gguf_files.gguf.GGUFReader(file, "r+")
    data = next(t for t in reader.tensors if t.name == f"blk.{layer}.ffn_{projection}_exps.weight").data
    data[expert, row, at] ^= 1
    reader.data.flush()
    return data.shape


def test_the_fingerprint_changes_with_every_matrix_of_the_sample_and_the_key_with_every_byte(tmp_path):
    file, plain = write_gguf(tmp_path, (Type.Q4_0,) * 3, changes=TWO)
    before, seen = keys(file), set()
    places = [(layer, name, expert) for layer in (0, 1) for name in ("gate", "up", "down") for expert in (0, 3)]
    for place in places:
        rows = flipped(file, *place, 0, 2)[1]
        outside = keys(file)
        assert 0 not in sampled_rows(rows) and outside[:2] == before[:2] and outside[2] != before[2]
        flipped(file, *place, 0, 2)
        flipped(file, *place, sampled_rows(rows)[0], 2)  # the first code of a row in the sample
        inside = keys(file)
        flipped(file, *place, sampled_rows(rows)[0], 2)
        assert all(new != old for new, old in zip(inside, before))
        seen |= {inside[0], outside[2]}
    assert len(seen) == 2 * len(places) and keys(file) == before


def test_the_key_covers_the_type_of_a_tensor(tmp_path):
    """Q4_0 and IQ4_NL have blocks of one size: the same bytes are other weights."""
    seen = set()
    for kind in (Type.Q4_0, Type.IQ4_NL):
        source = source_of(write_gguf(tmp_path / kind.name, (kind, Type.Q8_0, Type.Q8_0))[0])
        assert [name for name, _ in source[0].stored] == [kind.name, "Q8_0", "Q8_0"]
        seen.add(fingerprint_and_key("test", source, RECIPE, whole=True))
    assert len(seen) == 2


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q6_K, Type.MXFP4], ids=lambda kind: kind.name)
def test_an_altered_scale_in_a_sample_is_named(kind, tmp_path):
    file, _ = write_gguf(tmp_path, (kind,) * 3)
    reader = gguf_files.gguf.GGUFReader(file, "r+")
    data = next(t for t in reader.tensors if "ffn_up_exps" in t.name).data
    at = {Type.Q6_K: 208}.get(kind, 0)
    data[1, sampled_rows(data.shape[1])[1], at : at + 2] = 255  # NaN in float16, and in E8M0
    reader.data.flush()
    with pytest.raises(ValueError, match=r"model.gguf: layer 0: up of expert 1: a scale is (NaN|255)"):
        fingerprint_and_key("test", source_of(file), RECIPE, whole=False)


@pytest.mark.parametrize("types", [types for types, _ in KEPT], ids=["-".join(t.name for t in t) for t, _ in KEPT])
def test_codes_are_those_of_the_packages_weights(types, tmp_path):
    """A matrix in codes gives the numbers that the package gguf decodes, bit for bit."""
    from goldsmith.experts.packed.formats import FORMATS, decode

    file, _ = write_gguf(tmp_path, types)
    model = on_meta(file)
    (path, module), *_ = experts_modules(model)
    layer = open_checkpoint(file, model).experts(path, spec_of(module))
    for name in ("gate", "up", "down"):
        numbers = decode(FORMATS[layer.target.format], layer.codes(name, 1))
        assert torch.equal(numbers, layer.weights(name, 1))


def test_a_given_store_is_compared_by_the_sample_alone(tmp_path, monkeypatch):
    file, _ = write_gguf(tmp_path, (Type.Q4_0,) * 3, changes=TWO)
    read, plain = [], GgufLayer.codes

    def codes(layer, projection, expert):
        read.append(expert)
        return plain(layer, projection, expert)

    monkeypatch.setattr(GgufLayer, "codes", codes)
    count = source_of(file)[0].num_experts
    for experts in (range(count), [0]):  # the second start reads one expert, for the sizes
        with from_pretrained(file, device="cpu", store=tmp_path / "store"):
            pass
        assert sorted(set(read)) == list(experts)
        read.clear()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_a_large_tensor_is_decoded_in_slices(kind, monkeypatch):
    weight = np.random.default_rng(0).standard_normal((3, 7, 512)).astype(np.float32)
    data = gguf_files.blocks(weight, kind)
    whole = gguf_files.gguf.dequantize(data, kind)
    monkeypatch.setattr(blocks, "_SLICE", 2 * data.shape[-1])  # two rows at a time, and one at the end
    monkeypatch.setattr(blocks, "worth", lambda: 3)
    numbers = blocks.weights(kind, data)
    assert numbers.shape == whole.shape and np.array_equal(numbers.numpy(), whole)
