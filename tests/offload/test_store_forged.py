"""Headers with correct checksums and invalid contents, as another program or version might write them."""

import copy
import json
import struct

import pytest
import torch

from goldsmith.experts.packed.formats import FORMATS
from goldsmith.offload import ExpertStore, StoreCorrupt, StoreError
from goldsmith.offload.store import header
from goldsmith.offload.store.blocks import PAGE
from offload.stores import build, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "a.store"
    build(path, bias=True).close()
    return path.read_bytes()


def parts(data):
    begin = struct.unpack_from("<Q", data, 24)[0]
    return data[PAGE:begin], json.loads(data[begin:]), begin


def written(path, data, content=None, *, text=None):
    blocks, _, begin = parts(data)
    text = json.dumps(content).encode() if text is None else text
    path.write_bytes(header.prefix(text, begin) + blocks + text)
    return path


def set_(content, *where):
    """content with the last key of `where` set at the place that the other keys lead to."""
    *keys, last, value = where
    for key in keys:
        content = content[key]
    content[last] = value


def shorter(content, key):
    content["layers"][1][key] = content["layers"][1][key][:-2]


def one_expert_less(content):
    layer = content["layers"][1]
    for key in ("checksums", "samples"):
        layer[key] = layer[key][: len(layer[key]) * 5 // 6]
    layer["experts"] = 5


FORGED = {
    "a packing of tomorrow": (lambda c: set_(c, "packing", "version", 2), "packed as goldsmith.experts.panels 2"),
    "another packing": (lambda c: set_(c, "packing", "name", "rows"), "packed as rows 1, but this goldsmith reads"),
    "not complete": (lambda c: set_(c, "complete", False), "is inconsistent"),
    "an unknown format": (lambda c: set_(c, "format", "fp5"), "format='fp5'"),
    "an unknown dtype": (lambda c: set_(c, "source", "dtype", "int8"), "source="),
    "an unknown activation": (lambda c: set_(c, "activation", "swish"), "activation='swish' is unknown"),
    "no finite alpha": (lambda c: set_(c, "alpha", 1e999), "alpha=inf, expected a finite number"),
    "no finite limit": (lambda c: set_(c, "limit", float("nan")), "limit=nan, expected a finite number"),
    "exact is a word": (lambda c: set_(c, "source", "exact", "no"), "exact='no'"),
    "a section elsewhere": (lambda c: set_(c, "sections", "down", 0, 64), "sections"),
    "another stride": (lambda c: set_(c, "stride", 2 * c["stride"]), "of stride"),
    "sections are a list": (lambda c: set_(c, "sections", []), "is inconsistent"),
    "a size of nothing": (lambda c: set_(c, "hidden_size", 0), "is inconsistent"),
    "an offset elsewhere": (lambda c: set_(c, "layers", 1, "offset", 2 * PAGE), "layer 1: 6 experts at 8192, expected"),
    "an offset beyond numbers": (lambda c: set_(c, "layers", 1, "offset", 1e999), "at least 0, got inf"),
    "a layer below 0": (lambda c: set_(c, "layers", 0, "layer", -1), "at least 0, got -1"),
    "no experts": (lambda c: set_(c, "layers", 1, "experts", 0), "0 experts at"),
    "too few checksums": (lambda c: shorter(c, "checksums"), "6 experts at"),
    "too few samples": (lambda c: shorter(c, "samples"), "occurs twice, or its samples are incomplete"),
    "a layer twice": (lambda c: set_(c, "layers", 1, "layer", 0), "layer 0 occurs twice"),
    "fewer experts than blocks": (one_expert_less, "its layers end at"),
    "no layers": (lambda c: set_(c, "layers", []), "its layers end at"),
}


@pytest.mark.parametrize("change, text", FORGED.values(), ids=list(FORGED))
def test_an_inconsistent_header_is_refused(data, tmp_path, change, text):
    content = parts(data)[1]
    ExpertStore.open(
        written(tmp_path / "s", data, content), verify="full"
    ).close()  # the forging itself causes no error
    change(content)
    for verify in ("header", "none"):
        with pytest.raises(StoreError, match="ExpertStore.open: .*s") as error:
            ExpertStore.open(written(tmp_path / "s", data, content), verify=verify)
        assert text in str(error.value)


BROKEN = [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff", b"", b"7", b"null"]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:4]))
def test_a_header_that_is_not_json_is_refused(data, tmp_path, text):
    with pytest.raises(StoreCorrupt, match="its header is inconsistent"):
        ExpertStore.open(written(tmp_path / "s", data, text=text))


def test_a_file_of_a_store_without_layers_is_refused(data, tmp_path):
    content = parts(data)[1] | {"layers": []}
    text = json.dumps(content).encode()
    (tmp_path / "s").write_bytes(header.prefix(text, PAGE) + text)
    with pytest.raises(StoreCorrupt, match="its header is inconsistent"):
        ExpertStore.open(tmp_path / "s")


@pytest.mark.parametrize("shift, more", [(0, 8), (0, 1 << 62), (8, 0)])
def test_a_header_must_follow_the_blocks_and_end_the_file(data, tmp_path, shift, more):
    """Even with correct checksums: `more` bytes behind the header, or another offset in the first page."""
    blocks, content, begin = parts(data)
    text = json.dumps(content).encode()
    page = bytearray(header.prefix(text, begin + shift))
    size = begin + shift + len(text) + (more if more < PAGE else 0)
    head = struct.Struct("<8sIIQQQ32s")
    output = list(head.unpack_from(page))
    output[3], output[5] = size, len(text) + (more if more > PAGE else 0)
    packed = head.pack(*output)
    page[: head.size + 32] = packed + header.hashlib.sha256(packed).digest()
    (tmp_path / "s").write_bytes((bytes(page) + blocks + text + bytes(PAGE))[:size])
    for verify in ("header", "none"):
        with pytest.raises(StoreCorrupt, match="but the file has"):
            ExpertStore.open(tmp_path / "s", verify=verify)


def test_every_forged_header_raises_store_error_or_opens(data, tmp_path):
    """Every value of the header in turn is invalid or missing: StoreError, or a store that opens."""

    def places(content, at=()):
        yield at
        if isinstance(content, (dict, list)):
            for key in content if isinstance(content, dict) else range(len(content)):
                yield from places(content[key], (*at, key))

    plain = parts(data)[1]
    opened = 0
    for at in places(plain):
        for value in (None, -1, 0, 10**30, 1e999, "é", [], {"a": 1}):
            content = copy.deepcopy(plain)
            if at:
                set_(content, *at, value)
            try:
                ExpertStore.open(written(tmp_path / "s", data, content if at else value)).close()
                opened += 1
            except StoreError:
                pass
    assert opened < 40  # values without a constraint: fingerprint, alpha, limit, layer numbers, unchanged values


# -- blocks with gaps


def _group(format):
    return {"group_size": 32} if format == "int4_asym" else {}


@pytest.mark.parametrize("format", FORMATS)
def test_parts_begin_at_multiples_of_64_and_the_padding_is_zero_and_checked(tmp_path, format):
    sizes = {"H": 40, "I": 20} if format in ("fp32", "bf16") else {"H": 64, "I": 32}  # codes come in groups
    with build(tmp_path / "s", layers=(0,), bias=True, format=format, E=2, **_group(format), **sizes) as store:
        sections = [*store.blocks.sections.values(), (store.blocks.stride, 0)]
        assert all(begin % 64 == 0 for begin, _ in sections)
        at = store.raw(0, 1).data_ptr() - store.whole().data_ptr()
    gaps = [(end, begin) for (_, end), (begin, _) in zip(sections, sections[1:]) if begin > end]
    assert len(gaps) == 1 + (sizes["I"] == 20)  # the first bias, of 160 bytes, leaves a gap, and so does the last page
    whole = bytearray((tmp_path / "s").read_bytes())
    for end, begin in gaps:
        for place in (end, begin - 1):
            assert not whole[at + place]
            whole[at + place] = 1
            (tmp_path / "s").write_bytes(whole)
            with pytest.raises(StoreCorrupt, match="layer 0, expert 1, padding: the bytes do not match"):
                ExpertStore.open(tmp_path / "s", verify="full")
            whole[at + place] = 0


def test_an_arena_begins_at_a_multiple_of_64(tmp_path):
    with build(tmp_path / "s") as store:
        size = store.blocks.stride
        memory = torch.zeros(size + 128, dtype=torch.uint8)
        at = -memory.data_ptr() % 64
        store.blocks.base(memory[at : at + size])
        with pytest.raises(ValueError, match="begins at 0x[0-9a-f]+, expected a multiple of 64"):
            store.blocks.base(memory[at + 16 : at + 16 + size])


def test_dequantised_numbers_are_fresh_copies(tmp_path):
    """Writing to a view of the mapping would end the process."""
    with build(tmp_path / "s", layers=(0,), bias=True, format="fp32", dtype=torch.float32) as store:
        first = store.whole().data_ptr()
        dequantized = store.dequantize(0, 1)
        assert set(dequantized) == {"gate_up", "down", "gate_up_bias", "down_bias"}
        for name, numbers in dequantized.items():
            assert not first <= numbers.data_ptr() < first + store.nbytes, name
        for name, numbers in dequantized.items():
            numbers.zero_()
            assert store.dequantize(0, 1)[name].any()


@pytest.mark.parametrize("name", ["alpha", "limit"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_option_that_json_cannot_hold_is_refused_before_writing(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"ExpertStore.build: {name}={value}, expected a finite number"):
        ExpertStore.build({0: weights()}, tmp_path / "s", activation="swiglu_oai", **{name: value})
    assert list(tmp_path.iterdir()) == []
