"""The key, the samples and the store of a GGUF file's experts, and its dense part on several threads."""

import ctypes

import numpy as np
import pytest
import torch

from goldsmith.core import native
from goldsmith.experts.packed import panels
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
from goldsmith.offload.store.writer import build
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


# -- the native library -----------------------------------------------------------------------------------------------

NATIVE = [kind for kind, known in blocks.EXACT.items() if known.native is not None]
needs_native = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))


def every_scale(kind, seed=0):
    """Random blocks, one with each scale that the type can have, finite or not."""
    own = blocks.EXACT[kind]
    width, count = own.scales.itemsize, 256**own.scales.itemsize
    data = np.random.default_rng(seed).integers(0, 256, (count, own.nbytes), np.uint8)
    data[:, :width] = np.arange(count, dtype=f"<u{width}").view(np.uint8).reshape(count, width)
    return data


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@needs_native
@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_blocks_are_read_natively_as_in_numpy(kind):
    own, data = blocks.EXACT[kind], every_scale(kind)
    whole = own.native.read(data)
    for at in (slice(0, None), slice(5, 6), slice(7, 40)):
        ours, plain = own.native.read(data[at]), blocks._codes_in_numpy(kind, data[at], own.format)
        assert ours[2] == plain[2]
        for mine, theirs, all_of in zip(ours[:2], plain[:2], whole[:2]):
            assert mine.dtype == theirs.dtype and mine.numel() == theirs.numel()
            assert np.array_equal(bits(mine).ravel(), bits(theirs).ravel())
            assert np.array_equal(bits(mine), bits(all_of[at]))


@needs_native
@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_each_scale_that_is_not_finite_is_noticed(kind):
    own, data = blocks.EXACT[kind], every_scale(kind)
    scales = data[:, 0] if kind == Type.MXFP4 else data[:, :2].copy().view(np.float16)[:, 0]
    finite = scales != 255 if kind == Type.MXFP4 else np.isfinite(scales)
    for scale in np.concatenate((np.flatnonzero(~finite), np.flatnonzero(finite)[::501])):
        assert own.native.read(data[[3, scale, 4]])[2] == finite[scale]


@needs_native
@pytest.mark.parametrize("kind", blocks.DECODED, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(kind):
    """Every scale, subnormal ones too, even where the processor takes subnormal floats for zero."""
    data = every_scale(kind).reshape(512, -1)
    with np.errstate(invalid="ignore"):
        plain = gguf_files.gguf.dequantize(data, kind)
    for flushed in (False, True):
        numbers = np.empty(plain.shape, np.float32)
        torch.set_flush_denormal(flushed)
        try:
            blocks.EXACT[kind].native.decode(data, numbers)
        finally:
            torch.set_flush_denormal(False)
        there = ~np.isnan(plain)
        assert np.array_equal(np.isnan(numbers), ~there) and np.array_equal(bits(numbers[there]), bits(plain[there]))


@needs_native
def test_blocks_of_another_size_are_refused():
    own, data = blocks.EXACT[Type.Q4_0].native, np.zeros((4, 36), np.uint8)
    with pytest.raises(ValueError, match=r"blocks are uint8 \[4, 35\], expected contiguous bytes, 18 a block"):
        own.read(data[:, :35])
    with pytest.raises(ValueError, match=r"numbers are float32 \[4, 32\], expected 8 blocks in float32"):
        own.decode(data, np.empty((4, 32), np.float32))
    args = own._args(data)
    args.block_bytes = 34
    with pytest.raises(RuntimeError, match="blocks of 34 bytes with scales of 2, expected scales of 1 or 2 and 16"):
        native.check(native.library().gs_read_blocks(ctypes.byref(args)))


@needs_native
@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_the_store_has_the_same_bytes_without_the_native_library(kind, tmp_path, monkeypatch):
    file, _ = write_gguf(tmp_path, (kind,) * 3, changes=TWO)
    contents = []
    for why in (None, "not here"):
        monkeypatch.setattr(blocks, "reason", lambda why=why: why)
        monkeypatch.setattr(panels, "reason", lambda why=why: why)
        options = {name: RECIPE[name] for name in ("activation", "alpha", "limit")}
        build(source_of(file), tmp_path / "store", format="auto", group_size=None, options=options, overwrite=True,
              allow_nonfinite=False, progress=None)  # fmt: skip
        contents.append((tmp_path / "store").read_bytes())
    assert contents[0] == contents[1]
