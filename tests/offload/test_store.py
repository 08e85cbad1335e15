"""A store: its bytes, its numbers, what it refuses, and errors for damaged files."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from goldsmith import ShapeError, experts
from goldsmith.experts.packed.formats import FORMATS
from goldsmith.offload import ExpertStore, StoreCorrupt, StoreError, StoreMismatch
from goldsmith.offload.store.blocks import PAGE
from offload.processes import linux
from offload.stores import build, weights


def packed(layer, format, **other):
    biases = {name: layer[name] for name in ("gate_up_bias", "down_bias") if name in layer}
    return experts.pack(layer["gate_up"], layer["down"], format=format, **biases, **other)


# -- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_and_kernels_equal_those_of_the_packed_weights(tmp_path, format, bias):
    source = {layer: weights(seed=layer, bias=bias) for layer in (1, 4)}
    with ExpertStore.build(source, tmp_path / "s", format=format, **_group(format)) as store:
        base = packed(source[4], format, **_group(format))
        gate_up, down = base.unpack()
        x, ids = torch.randn(5, 64), torch.randint(-1, 6, (5, 2))
        assert torch.equal(experts.slots(x, ids, store.experts(4), **store.options), experts.slots(x, ids, base))
        for e in (0, 5):
            dequantized = store.dequantize(4, e)
            assert torch.equal(dequantized["gate_up"], gate_up[e]) and torch.equal(dequantized["down"], down[e])
            for name in ("gate_up_bias", "down_bias") if bias else ():
                assert torch.equal(dequantized[name], source[4][name][e].float())
            assert set(dequantized) == {"gate_up", "down"} | ({"gate_up_bias", "down_bias"} if bias else set())
        store.verify()


def _group(format):
    return {"group_size": 32} if format == "int4_asym" else {}


def test_a_slots_arena_computes_what_the_store_does(tmp_path):
    with build(tmp_path / "s", bias=True, format="int8") as store:
        arena = torch.full((3, store.expert_nbytes(1)), 255, dtype=torch.uint8)
        base = store.blocks.base(arena)
        arena[2].copy_(store.raw(1, 4))
        x = torch.randn(2, 64)
        wanted = experts.slots(x, torch.full((2, 1), 4), store.experts(1))
        assert torch.equal(experts.slots(x, torch.full((2, 1), 2), base), wanted)
        assert store.differs(arena[2], 1, 4) is None and store.differs(arena[2], 1, 3) == "gate"
        for wrong in (arena[:, 1:], arena.view(torch.int8), arena.view(-1)[64 : 64 + 5]):
            with pytest.raises(ValueError, match="ExpertBlocks.base: arena is"):
                store.blocks.base(wrong)


def test_an_expert_is_one_range_that_begins_at_a_page(tmp_path):
    with build(tmp_path / "s", bias=True, E=3, H=40, I=24) as store:
        start = store.whole().data_ptr()
        for layer in store.layers:
            for e in range(3):
                block = store.raw(layer, e)
                assert block.is_contiguous() and block.numel() == store.expert_nbytes(layer)
                assert (block.data_ptr() - start) % PAGE == 0 and block.numel() % PAGE == 0
            assert torch.equal(store.raw_layer(layer)[2], store.raw(layer, 2))
        ends = [end for _, end in store.blocks.sections.values()]
        assert list(store.blocks.sections) == ["gate", "up", "down", "gate_up_bias", "down_bias"]
        assert ends == sorted(ends) and ends[-1] <= store.blocks.stride


def test_its_attributes_describe_it(tmp_path):
    source = {3: weights(E=2), 1: weights(E=5)}
    output = dict(activation="swiglu_oai", alpha=1.5, limit=6.0)
    with ExpertStore.build(source, tmp_path / "fits", format="int4_asym") as store:
        assert store.group_size == 32  # 128 divides neither 64 nor 32
    with ExpertStore.build(source, tmp_path / "s", format="int4", group_size=16, **output) as store:
        assert (store.path, store.format, store.group_size) == (tmp_path / "s", "int4", 16)
        assert store.layers == (3, 1) and (store.num_experts(3), store.num_experts(1)) == (2, 5)
        assert (store.hidden_size, store.intermediate_size, store.has_bias) == (64, 32, False)
        assert store.options == output and (store.activation, store.alpha, store.limit) == tuple(output.values())
        assert store.nbytes == os.path.getsize(store.path) and not store.exact and store.dtype == torch.bfloat16
        assert store.metadata["complete"] is True and store.metadata["packing"]["version"] == 1
        assert repr(store).endswith("int4, layers=2, experts=7, hidden_size=64, intermediate_size=32)")
        with pytest.raises(KeyError, match="there is no layer 0; the layers are 3, 1"):
            store.raw(0, 0)
        for e in (2, -1):
            with pytest.raises(IndexError, match=rf"layer 3 has no expert {e}; its experts are 0\.\.1"):
                store.raw(3, e)


@pytest.mark.parametrize(
    "dtype, format, exact",
    [(torch.bfloat16, "bf16", True), (torch.float16, "fp32", True), (torch.float32, "fp32", True)],
    ids=["bf16", "fp16", "fp32"],
)
def test_auto_is_the_narrowest_format_that_holds_the_weights(tmp_path, dtype, format, exact):
    source = {0: weights(dtype=dtype)}
    with ExpertStore.build(source, tmp_path / "s") as store:
        assert (store.format, store.exact, store.dtype) == (format, exact, dtype)
        assert torch.equal(store.dequantize(0, 2)["gate_up"], source[0]["gate_up"][2].float())
    with ExpertStore.build(source, tmp_path / "t", format="bf16") as store:
        assert store.exact == (dtype == torch.bfloat16)


def test_auto_is_refused_with_advice_if_a_later_layer_needs_a_wider_format(tmp_path):
    source = {0: weights(), 1: weights(dtype=torch.float32)}
    with pytest.raises(ValueError, match=r"layer 1: gate of expert 0 is float32, but bf16.*pass format='fp32'"):
        ExpertStore.build(source, tmp_path / "s")
    assert ExpertStore.build(source, tmp_path / "s", format="fp32").exact


# -- sources ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_bytes(tmp_path):
    whole = {layer: weights(seed=layer, bias=True) for layer in (0, 2)}

    def pair(layer):
        gate, up = layer["gate_up"].chunk(2, 1)
        return {**layer, "gate_up": (gate, up)}

    def lists(layer):
        return {name: list(tensor) for name, tensor in layer.items()}

    sources = {
        "mapping": whole,
        "iterable": iter(whole.items()),
        "pairs": {n: pair(layer) for n, layer in whole.items()},
        "one by one": {n: lists(layer) for n, layer in whole.items()},
        "generators": ((n, {k: iter(v) for k, v in lists(layer).items()}) for n, layer in whole.items()),
        "strided": {n: {**w, "down": w["down"].mT.contiguous().mT} for n, w in whole.items()},
        "again": whole,
    }
    files = {name: ExpertStore.build(source, tmp_path / name).path.read_bytes() for name, source in sources.items()}
    assert len(set(files.values())) == 1


@pytest.mark.parametrize("format", ["int4", "mxfp4", "fp8_block"])
def test_codes_are_kept_bit_for_bit(tmp_path, format):
    base = packed(weights(), format, partitions=2) if format == "int4" else packed(weights(), format)
    with ExpertStore.build({7: base}, tmp_path / "s") as store:
        assert (store.format, store.exact, store.dtype) == (format, True, None)
        gate_up, _ = base.unpack()
        assert torch.equal(store.dequantize(7, 3)["gate_up"], gate_up[3])
        store.check_source({7: base})
        with pytest.raises(StoreMismatch, match="plain weights, but the store was built from codes"):
            store.check_source({7: weights()})
    with pytest.raises(ValueError, match=r"codes of .* never requantised.*use format='auto'"):
        ExpertStore.build({7: base}, tmp_path / "t", format="bf16")


def files_of_a_checkpoint(folder, fused, shards):
    source = {layer: weights(seed=layer) for layer in (1, 12)}
    tensors = {"model.embed_tokens.weight": torch.zeros(3), "model.layers.1.mlp.gate.weight": torch.zeros(2, 2)}
    tensors["model.layers.1.mlp.shared_experts.gate_proj.weight"] = torch.zeros(2, 2)
    for layer, w in source.items():
        stem = f"model.layers.{layer}.mlp.experts"
        if fused:
            tensors |= {f"{stem}.gate_up_proj": w["gate_up"], f"{stem}.down_proj": w["down"]}
            continue
        for e in range(6):
            gate, up = w["gate_up"][e].chunk(2)
            names = ("w1", "w3", "w2") if layer == 12 else ("gate_proj", "up_proj", "down_proj")
            for name, t in zip(names, (gate, up, w["down"][e])):
                tensors[f"{stem}.{e}.{name}.weight"] = t.contiguous()
    folder.mkdir()
    names = sorted(tensors)
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        index |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return source


@pytest.mark.parametrize("fused, shards", [(False, 1), (True, 1), (False, 3)], ids=["single", "fused", "sharded"])
def test_a_checkpoint_folder_is_a_source(tmp_path, fused, shards):
    source = files_of_a_checkpoint(tmp_path / "model", fused, shards)
    built = ExpertStore.build(tmp_path / "model", tmp_path / "s")
    assert built.path.read_bytes() == ExpertStore.build(source, tmp_path / "t").path.read_bytes()
    built.check_source(str(tmp_path / "model"))


def test_missing_and_unknown_tensors_of_a_checkpoint_are_named(tmp_path):
    def broken(name, change, match, kind=ValueError):
        files_of_a_checkpoint(tmp_path / name, False, 3)
        change(tmp_path / name)
        with pytest.raises(kind, match=match):
            ExpertStore.build(tmp_path / name, tmp_path / "s")
        assert not (tmp_path / "s").exists()

    def without(key):
        def change(folder):
            file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]
            tensors = {name: tensor for name, tensor in load_file(folder / file).items() if name != key}
            save_file(tensors, folder / file)

        return change

    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    broken("tensor", without(key), "layer 1, expert 3 lacks the up projection")
    shard = "model-00002-of-00003.safetensors"
    broken("shard", lambda folder: (folder / shard).unlink(), f"the shard {shard}, which its index names, is missing")
    broken("cut", lambda folder: os.truncate(folder / shard, 3000), f"{shard}.*not a complete safetensors file")
    broken("index", lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "not an index of shards")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no safetensors file"):
        ExpertStore.build(tmp_path / "empty", tmp_path / "s")
    save_file(
        {"model.layers.0.mlp.experts.0.up_proj.weight_packed": torch.zeros(2)}, tmp_path / "empty" / "a.safetensors"
    )
    with pytest.raises(ValueError, match=r"weight_packed is not a known name of plain"):
        ExpertStore.build(tmp_path / "empty", tmp_path / "s")


W = weights()
BAD = {
    "a number": (3, {}, TypeError, "source is an int, expected the folder of a checkpoint, a mapping"),
    "no pairs": ([1, 2], {}, TypeError, r"source yields 1, expected pairs \(layer, weights\)"),
    "no layer": ({}, {}, ValueError, "source holds no layer"),
    "twice": ([(1, W), (1, W)], {}, ValueError, "source yields layer 1 twice"),
    "negative": ({-1: W}, {}, ValueError, "source yields layer -1, expected numbers from 0 on"),
    "no down": ({2: {"gate_up": W["gate_up"]}}, {}, ValueError, "layer 2: the dict of weights has no 'down'"),
    "another key": ({2: {**W, "router": 1}}, {}, ValueError, "has the key 'router'; the keys are gate_up, down"),
    "no weights": ({2: None}, {}, TypeError, "layer 2: weights are a NoneType, expected a dict"),
    "float64": (
        {2: {**W, "down": W["down"].double()}},
        {},
        TypeError,
        "layer 2: down .*float64.*convert float64 with .float",
    ),
    "transposed": ({2: {**W, "down": W["down"].mT}}, {}, ShapeError, r"layer 2: expert 0 has gate \[32, 64\]"),
    "uneven": ({2: {**W, "down": W["down"][:5]}}, {}, ShapeError, "has experts=6, but down has experts=5"),
    "odd": ({2: {**W, "gate_up": W["gate_up"][:, 1:]}}, {}, ShapeError, "gate_up of expert 0 has 63 rows"),
    "other sizes": ({0: W, 1: weights(H=32)}, {}, ShapeError, r"layer 1: expert 0 has \(H, I\) = \(32, 32\)"),
    "other biases": ({0: W, 1: weights(bias=True)}, {}, ValueError, "layer 1: expert 0 has biases gate_up_bias, down"),
    "bias of E": ({0: {**W, "down_bias": torch.zeros(6, 3)}}, {}, ShapeError, r"down_bias of expert 0 is \[3\]"),
    "format": ({0: W}, {"format": "int3"}, ValueError, "format='int3' is unknown; choose one of: 'auto', 'fp32'"),
    "group": ({0: W}, {"format": "int4", "group_size": 48}, ValueError, "group_size=48 .*these would work"),
    "activation": ({0: W}, {"activation": "tanh"}, ValueError, "activation='tanh' is unknown; choose one of: 'silu'"),
    "alpha": ({0: W}, {"alpha": "x"}, TypeError, "alpha='x' is of type str, expected a number"),
    "codes of NaN": ({0: W}, {"format": "int8", "allow_nonfinite": True}, ValueError, "has no code for NaN and Inf"),
    "overwrite": ({0: W}, {"overwrite": 1}, TypeError, "overwrite=1 is an int, expected True or False"),
    "no folder": ("nowhere", {}, ValueError, "nowhere has no safetensors file"),
}


@pytest.mark.parametrize("source, options, kind, text", BAD.values(), ids=list(BAD))
def test_invalid_sources_are_refused_and_leave_no_file(tmp_path, source, options, kind, text):
    with pytest.raises(kind, match=text):
        ExpertStore.build(source, tmp_path / "s", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_number_is_refused_by_name_unless_allowed(tmp_path, value):
    source = {0: weights(), 5: weights(bias=True, seed=1)}
    del source[0]
    source[5]["down"][3, 2, 1] = value
    for format in ("auto", "int4"):
        with pytest.raises(ValueError, match=rf"layer 5: down of expert 3 is {value} at \[2, 1\]"):
            ExpertStore.build(source, tmp_path / "s", format=format)
    with ExpertStore.build(source, tmp_path / "s", allow_nonfinite=True) as store:
        assert torch.equal(store.dequantize(5, 3)["down"].isfinite(), source[5]["down"][3].isfinite())
    source[5]["down"][3, 2, 1] = 0
    source[5]["gate_up_bias"][2, 9] = value
    with pytest.raises(ValueError, match=rf"layer 5: gate_up_bias of expert 2 is {value} at \[9\]"):
        ExpertStore.build(source, tmp_path / "t")


# -- damaged, truncated, of another kind ------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    build(tmp_path / "s", bias=True).close()
    return tmp_path / "s"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_changed_byte_is_found_and_named(file):
    with ExpertStore.open(file) as store:
        sections, stride = store.blocks.sections, store.blocks.stride
    for section, (begin, end) in [*sections.items(), ("padding", (stride - 1, stride))]:
        at = PAGE + (6 + 2) * stride + (begin + end) // 2  # layer 1, expert 2
        flip(file, at)
        with pytest.raises(StoreCorrupt, match=f"layer 1, expert 2, {section}: the bytes do not match") as error:
            ExpertStore.open(file, verify="full")
        assert (error.value.layer, error.value.expert, error.value.section) == (1, 2, section)
        with ExpertStore.open(file) as store:
            store.verify([0])
            with pytest.raises(StoreCorrupt):
                store.verify([1])
        flip(file, at)
    ExpertStore.open(file, verify="full").close()


def test_every_byte_of_the_header_is_checked(file):
    size, begin = file.stat().st_size, struct.unpack_from("<Q", file.read_bytes(), 24)[0]
    for at in [*range(8, 108), 2000, PAGE - 1, begin, begin + 1, (begin + size) // 2, size - 1]:
        flip(file, at)
        with pytest.raises(StoreError):
            ExpertStore.open(file)
        flip(file, at)
    ExpertStore.open(file).close()


def test_a_truncated_or_extended_file_says_so(file):
    data = file.read_bytes()
    for cut in (len(data) - 1, len(data) // 2, PAGE, PAGE - 1, 9):
        file.write_bytes(data[:cut])
        for verify in ("header", "none"):
            with pytest.raises(StoreCorrupt, match="truncated"):
                ExpertStore.open(file, verify=verify)
    file.write_bytes(data + b"x")
    with pytest.raises(StoreCorrupt, match=f"it has {len(data) + 1} bytes but was written with {len(data)}"):
        ExpertStore.open(file)


def test_a_newer_version_or_another_kind_of_file_says_so(file, tmp_path):
    data = bytearray(file.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    file.write_bytes(data)
    with pytest.raises(StoreError, match="has file version 2, but this goldsmith reads version 1: update goldsmith"):
        ExpertStore.open(file)
    for content, text in ((b"", "it is empty"), (b"PK\3\4" + bytes(5000), r"begins with b'PK")):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(StoreError, match=text):
            ExpertStore.open(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        ExpertStore.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="verify='some' is unknown; choose one of: 'none', 'header', 'full'"):
        ExpertStore.open(file, verify="some")


@linux
@pytest.mark.parametrize("what", ["a pipe", "a device", "a socket", "a link to itself"])
def test_pipes_devices_and_folders_do_not_block_and_are_not_replaced(what, tmp_path):
    path = {"a device": Path("/dev/null")}.get(what, tmp_path / "p")
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif what == "a link to itself":
        path.symlink_to(path)
    message = "Too many levels" if what == "a link to itself" else f"path is {what}, expected a regular file: '{path}'"
    with pytest.raises(OSError, match=message) as error:
        ExpertStore.open(path)
    assert error.value.filename == str(path)
    if what != "a device":  # this machine's own
        with pytest.raises(OSError, match=message):
            build(path, overwrite=True)
        assert os.path.lexists(path) and not path.is_file()


def test_verify_none_reads_no_checksum(file):
    begin = struct.unpack_from("<Q", file.read_bytes(), 24)[0]
    data = file.read_bytes()
    text = data[begin:]
    at = begin + text.index(b'"checksums":"') + 20
    flipped = bytes([data[at] ^ 1])
    file.write_bytes(data[:at] + flipped + data[at + 1 :])
    with pytest.raises(StoreCorrupt, match="its header does not match its checksum"):
        ExpertStore.open(file)
    ExpertStore.open(file, verify="none").close()
