"""gs_write_panels gives the bytes of the torch version, for every format, odd sizes and views of larger tensors."""

import ctypes

import pytest
import torch

from experts.test_layout import EACH, layout_of, random_codes
from goldsmith.core import native
from goldsmith.experts.packed import panels
from goldsmith.experts.packed.formats import FORMATS, Codes

pytestmark = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))
# rows that fill no panel, one panel, and begin another; inputs that fill no word, no tile, one tile, several
SIZES = [(1, 8), (15, 40), (16, 128), (17, 136), (33, 520), (130, 264)]
PLAIN = [(3, 1), (16, 7), (31, 65)]  # no groups: any number of inputs


def sizes_of(name):
    fmt = FORMATS[name]
    if name == "mxfp4":
        return [(rows, -(-inputs // 32) * 32) for rows, inputs in SIZES]
    return SIZES if fmt.bits == 4 else SIZES + PLAIN


def written(write, layout, place, matrix, fill):
    panel_bytes = torch.full((place.panels, place.panel_bytes), fill, dtype=torch.uint8)
    write(layout.kind, place, panel_bytes, matrix)
    return panel_bytes


def both(layout, rows, inputs, matrix):
    place = panels.placed(layout.kind, rows, inputs, layout.group_size, layout.scale_dtype)
    for fill in (0, 0xA5):  # the padding at the end of a panel is left as it is
        ours, plain = (
            written(f, layout, place, matrix, fill) for f in (panels._write_natively, panels._write_in_torch)
        )
        assert torch.equal(ours, plain)
    return place


KINDS = [(name, scale) for name in EACH for scale in FORMATS[name].scales or (None,)]


@pytest.mark.parametrize("name, scale", KINDS, ids=[f"{name}-{str(scale)[6:]}" for name, scale in KINDS])
def test_the_native_panels_are_those_of_torch(name, scale):
    for rows, inputs in sizes_of(name):
        layout = layout_of(name, E=1, H=inputs, I=inputs, scale=scale)
        both(layout, rows, inputs, random_codes(layout, rows, inputs))


@pytest.mark.parametrize("name", EACH)
def test_views_of_larger_tensors_are_read_by_their_strides(name):
    layout = layout_of(name, E=1, H=128, I=128)
    whole = random_codes(layout, 160, 256)
    rows = slice(1, 2) if name == "fp8_block" else slice(16, 56)  # of the scales
    groups = slice(0, -(-128 // (layout.group_size or 128)))
    codes = whole.codes[16:56, 4 : 4 + 128 // layout.kind.per_code]
    parts = [codes, *(None if part is None else part[rows, groups] for part in (whole.scales, whole.zeros))]
    both(layout, 40, 128, Codes(*parts))
    both(layout, 40, 128, Codes(*(None if part is None else in_columns(part) for part in parts)))


def in_columns(part):
    """The same matrix with the elements of a column next to each other."""
    return part.clone(memory_format=torch.contiguous_format).t().clone(memory_format=torch.contiguous_format).t()


def test_sizes_that_contradict_each_other_are_refused():
    layout = layout_of("int4", E=1, H=64, I=32)
    matrix = random_codes(layout, 32, 64)
    place = panels.placed(layout.kind, 32, 64, layout.group_size, layout.scale_dtype)
    out = torch.zeros(place.panels, place.panel_bytes, dtype=torch.uint8)
    short = Codes(matrix.codes[:20], matrix.scales, matrix.zeros)
    with pytest.raises(ValueError, match=r"codes are \[20, 32\], expected 32 rows"):
        panels.write_matrix(layout, place, out, short)
    with pytest.raises(ValueError, match="scales are"):
        panels.write_matrix(layout, place, out, Codes(matrix.codes, matrix.scales[:, :3]))
    with pytest.raises(ValueError, match="panels are"):
        panels.write_matrix(layout, place, out[:1], matrix)
    args = panels.PanelArgs(
        codes=matrix.codes.data_ptr(), rows=32, code_bytes=32, out=out.data_ptr(), panels=1, tiles=1
    )
    with pytest.raises(RuntimeError, match="32 rows of 32 bytes do not fit 1 panels"):
        native.check(native.library().gs_write_panels(ctypes.byref(args)))
