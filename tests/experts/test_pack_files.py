"""Saving and loading: every bit survives, errors name the damage, and a failed save keeps the previous file."""

import errno
import json
import os
import re
import stat
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from goldsmith.experts import PackedExperts, pack
from goldsmith.experts.packed import files
from goldsmith.experts.packed.formats import FORMATS, from_nibbles

E, H, I = 2, 64, 96
GROUPS = {"int4": 32, "int4_asym": 32, "int8": 16}


def base_of(format="int4", partitions=1, bias=True, **options):
    generator = torch.Generator().manual_seed(5)
    both, down = (torch.randn(s, generator=generator) for s in ((E, 2 * I, H), (E, H, I)))
    if bias:
        options |= {"gate_up_bias": torch.ones(E, 2 * I), "down_bias": torch.randn(E, H).bfloat16()}
    group = options.pop("group_size", GROUPS.get(format))
    return pack(both, down, format=format, group_size=group, partitions=partitions, **options)


def same(a, b):
    ours, theirs = ((x.gate_up, x.down, x.gate_up_bias, x.down_bias) for x in (a, b))
    equal = all(x is y or (torch.equal(x, y) and x.dtype == y.dtype) for x, y in zip(ours, theirs))
    return a.layout == b.layout and equal


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
def test_every_bit_survives_saving_and_loading(tmp_path, format, mmap):
    base = base_of(format, partitions=2)
    base.save(tmp_path / "experts.safetensors")
    assert same(PackedExperts.load(tmp_path / "experts.safetensors", mmap=mmap), base)
    for partitions in (1, 3):
        again = PackedExperts.load(tmp_path / "experts.safetensors", mmap=mmap, partitions=partitions)
        assert same(again, base.partition(partitions))
    assert os.listdir(tmp_path) == ["experts.safetensors"]


def test_sizes_smaller_than_a_tile_survive_too(tmp_path):
    for format, H, I in (("fp32", 5, 3), ("bf16", 7, 1), ("fp8_block", 130, 3)):
        base = pack(torch.randn(1, 2 * I, H), torch.randn(1, H, I), format=format)
        base.save(tmp_path / "f")
        assert same(PackedExperts.load(tmp_path / "f"), base)
    base = pack(torch.randn(1, 26, 9), torch.randn(1, 9, 13), format="int8", scale_dtype=torch.bfloat16, partitions=3)
    base.save(tmp_path / "f")
    assert same(PackedExperts.load(tmp_path / "f"), base)


@pytest.mark.parametrize("partitions", [1, 3])
def test_the_file_is_row_major_safetensors_with_any_number_of_slices(tmp_path, partitions):
    base = base_of("int4_asym", partitions)
    base.save(tmp_path / "f")
    stored = load_file(tmp_path / "f")
    assert sorted(stored) == sorted(
        [f"{m}.{part}" for m in ("gate", "up", "down") for part in ("codes", "scales", "zeros")]
        + ["gate_up_bias", "down_bias"]
    )
    weights = base.unpack(torch.float64)
    for name, wanted in (("gate", weights[0][:, :I]), ("up", weights[0][:, I:]), ("down", weights[1])):
        codes, scales, zeros = (stored[f"{name}.{part}"].double() for part in ("codes", "scales", "zeros"))
        numbers = from_nibbles(stored[f"{name}.codes"]).double().unflatten(-1, (-1, 32)) - zeros.unsqueeze(-1)
        assert torch.equal((numbers * scales.unsqueeze(-1)).flatten(-2), wanted) and codes.dtype == torch.float64
    with safe_open(tmp_path / "f", "pt") as file:
        metadata = file.metadata()
    assert {key: metadata[key] for key in metadata if "crc32" not in key} == {
        "goldsmith.experts": "1",
        "format": "int4_asym",
        "group_size": "32",
        "scale_dtype": "fp16",
        "num_experts": "2",
        "hidden_size": "64",
        "intermediate_size": "96",
        "partitions": str(partitions),
    }


def test_a_file_rewritten_by_other_software_still_loads(tmp_path):
    base = base_of("mxfp4")
    base.save(tmp_path / "f")
    with safe_open(tmp_path / "f", "pt") as file:
        metadata = file.metadata()
    save_file(dict(reversed(load_file(tmp_path / "f").items())), tmp_path / "g", metadata)
    assert same(PackedExperts.load(tmp_path / "g"), base)


def test_a_base_on_another_device_can_be_saved(tmp_path):
    base = base_of()
    base.to(torch.device("cpu", 0)).save(str(tmp_path / "f"))
    assert same(PackedExperts.load(str(tmp_path / "f")), base)


# -- failed saves -----------------------------------------------------------------------------------------------------


class Full:
    """A file whose disk is full after `room` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe"])
def test_a_path_that_is_not_a_regular_file_is_refused_before_writing(tmp_path, monkeypatch, kind):
    path = tmp_path / "here"
    path.mkdir() if kind == "folder" else os.mkfifo(tmp_path / "pipe")
    if kind != "folder":
        path = tmp_path / "pipe"
    if kind == "link to a pipe":
        path = tmp_path / "link"
        path.symlink_to("pipe")
    monkeypatch.setattr(files.tempfile, "mkstemp", None)
    before = sorted(tmp_path.iterdir())
    what = "a folder" if kind == "folder" else "a device, a pipe or a socket"
    with pytest.raises(OSError, match=rf"PackedExperts\.save: the path is {what}, not a file; nothing was written"):
        base_of().save(path)
    assert sorted(tmp_path.iterdir()) == before and not path.is_file()


@pytest.mark.parametrize("room", [0, 2000, 12000])
def test_a_full_disk_leaves_the_previous_file_unchanged(tmp_path, monkeypatch, room):
    path = tmp_path / "f"
    base_of("bf16").save(path)
    before = path.read_bytes()
    real = open
    monkeypatch.setattr(files, "open", lambda *a, **k: Full(real(*a, **k), room), raising=False)
    message = (
        r"PackedExperts\.save: No space left on device; the file needs \d+\.\d MB; the previous file is unchanged: "
    )
    with pytest.raises(OSError, match=f"{message}{re.escape(repr(str(path)))}") as caught:
        base_of("int4").save(path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["f"]


def test_a_failed_sync_leaves_the_previous_file_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"before")

    def fail(handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        base_of().save(path)
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["f"]


def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path):
    path, link = tmp_path / "f", tmp_path / "link"
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    base_of().save(link)
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    base_of().save(tmp_path / "new")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    with pytest.raises(FileNotFoundError):
        base_of().save(tmp_path / "nowhere" / "f")


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    base_of("int4").save(tmp_path / "f")
    return tmp_path / "f"


def edited(path, change):
    """Rewrite the file with a changed header and the same tensor bytes."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def says(path, *words):
    with pytest.raises(ValueError) as error:
        PackedExperts.load(path)
    text = str(error.value)
    assert text.startswith(f"PackedExperts.load: {path}") and "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("name", ["gate.codes", "down.scales", "up.codes", "gate_up_bias"])
def test_the_error_for_a_flipped_bit_names_the_tensor(saved, name):
    data = bytearray(saved.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + (begin + end) // 2] ^= 16
    saved.write_bytes(data)
    says(saved, f"is damaged: the bytes of {name} have changed since it was saved (its checksum does not match)")


@pytest.mark.parametrize("kept", [0, 7, 9, 500])
def test_a_file_truncated_in_its_header_is_refused(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    says(saved, "is not a file that PackedExperts.save wrote", f"its {kept} bytes have no safetensors header")


def test_the_error_for_a_truncated_file_names_the_tensor(saved):
    saved.write_bytes(saved.read_bytes()[:-100])
    says(saved, "is damaged: ", "codes is truncated: the file is 100 bytes too short for it")


@pytest.mark.parametrize("mmap", [True, False])
def test_other_files_are_refused(tmp_path, mmap):
    path = tmp_path / "f"
    save_file({"weight": torch.zeros(3)}, path)
    says(path, "its metadata has no key 'goldsmith.experts' (keys: none)")
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    says(path, "has no key 'goldsmith.experts' (keys: 'format')")
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    says(path, "no safetensors header")
    path.write_bytes(struct.pack("<Q", 5) + b"[1,2]" + bytes(20))
    says(path, "no key 'goldsmith.experts'")
    path.write_bytes(struct.pack("<Q", 5) + b"{nope" + bytes(20))
    says(path, "its header is not JSON")
    with pytest.raises(FileNotFoundError):
        PackedExperts.load(tmp_path / "none", mmap=mmap)
    with pytest.raises(IsADirectoryError):
        PackedExperts.load(tmp_path, mmap=mmap)


def setter(*keys, value):
    def change(header):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


META = "__metadata__"
DAMAGE = [
    (lambda h: h.pop("up.scales"), "the tensor 'up.scales' is missing"),
    (lambda h: h.update(extra=h["up.scales"]), "there is no tensor 'extra' in the format int4"),
    (setter("up.codes", "dtype", value="I8"), "up.codes has dtype 'I8', expected 'U8'"),
    (setter("up.codes", "shape", value=[2, 96, 33]), "up.codes has shape [2, 96, 33], expected [2, 96, 32]"),
    (setter("up.codes", "data_offsets", value=[0, 5]), "up.codes has 5 bytes by its data_offsets, expected 6144"),
    (setter("up.codes", "data_offsets", value=[-6144, 0]), "up.codes begins before the first tensor"),
    (setter("up.codes", "data_offsets", value=[10**12, 10**12 + 6144]), "up.codes is truncated"),
    (setter("up.codes", "data_offsets", value="all"), "the header's entry of 'up.codes' is not a dtype, a shape and"),
    (setter("up.codes", value=None), "the header's entry of 'up.codes' is not a dtype, a shape and two data_offsets"),
    (setter("down_bias", "dtype", value="I64"), "down_bias has dtype 'I64', expected F32, BF16 or F16"),
    (setter(META, "format", value="int5"), "the metadata's 'format' is 'int5', expected one of 'fp32', 'bf16'"),
    (setter(META, "scale_dtype", value="e8m0"), "its metadata is inconsistent (Layout: int4 has no scales in"),
    (setter(META, "scale_dtype", value=[]), "the metadata's 'scale_dtype' is [], expected one of 'fp32'"),
    (setter(META, "num_experts", value="0"), "the metadata's 'num_experts' is '0', expected a number of at least 1"),
    (setter(META, "num_experts", value=2), "the metadata's 'num_experts' is 2, expected"),
    (setter(META, "hidden_size", value="65"), "its metadata is inconsistent (Layout: group_size=32 does not divide"),
    (setter(META, "intermediate_size", value="9" * 99), "the metadata's 'intermediate_size' is '999"),
    (setter(META, "partitions", value="99999"), "the metadata's 'partitions' is 99999, expected at most 65536"),
    (setter(META, "group_size", value=""), "its metadata is inconsistent (Layout: group_size=None"),
    (lambda h: h[META].pop("group_size"), "the metadata's 'group_size' is None, expected"),
    (lambda h: h[META].pop("crc32 up.codes"), "the bytes of up.codes have changed"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), DAMAGE, ids=range(len(DAMAGE)))
def test_the_error_for_a_damaged_header_names_the_tensor_or_key(saved, change, words):
    edited(saved, change)
    says(saved, "is damaged: " + words)


def test_the_error_for_a_later_version_says_how_to_read_the_file(saved):
    edited(saved, setter(META, "goldsmith.experts", value="2"))
    says(saved, "'goldsmith.experts' is '2', but this goldsmith reads '1': load it with the version of goldsmith that")


def test_changing_any_byte_raises_or_changes_nothing(saved):
    """After a change of any single byte, also in the header, loading raises ValueError or gives the same base."""
    base, data = PackedExperts.load(saved), saved.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    generator = torch.Generator().manual_seed(1)
    places = [*range(0, header, 7), *torch.randint(header, len(data), (60,), generator=generator).tolist()]
    for at in places:
        saved.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            loaded = PackedExperts.load(saved)
        except ValueError:
            continue
        assert same(loaded.partition(1), base)


@pytest.mark.parametrize(
    ("options", "says"), [({"partitions": 0}, "partitions=0, expected"), ({"nodes": [0, 0]}, "nodes=")]
)
def test_wrong_options_are_refused(saved, options, says):
    with pytest.raises(ValueError, match="PackedExperts.load: " + says):
        PackedExperts.load(saved, **options)
