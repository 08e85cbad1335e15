"""Bundles: every bit is restored, hostile ones are refused, and a replay reports what is the same here."""

import json
import math
import os
import shutil

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.binding import inputs_and_scalars
from goldsmith.assay.diagnosis.report import bundle as bundles
from goldsmith.assay.diagnosis.report.replay import replay
from goldsmith.assay.execute.records import Material
from goldsmith.assay.execute.run import execute


def golden(x, w, eps):
    return x * w + eps


def wrong(x, w, eps):
    return x * w * 1.5 + eps


def target(candidate=wrong):
    return assay.Target(candidate, golden, cases={"x": torch.randn(3, 4), "w": torch.randn(4), "eps": 0.5}, name="mul")


def material(supply, of=None):
    inputs, scalars = inputs_and_scalars(supply)
    return Material(of or target(), "rows[T=3,D=4]", {"T": 3, "D": 4}, inputs, scalars, 7)


def plain():
    return {"x": torch.randn(3, 4), "w": torch.randn(4), "eps": 0.5}


def saved(folder, supply=None, of=None, **more):
    results = material(supply or plain(), of)
    run = execute(results)
    outputs = {n: t for n, _, t in run.results() if t is not None}
    return bundles.save(folder, results, torch.float32, golden={}, outputs=outputs, **more)


def stored(folder, tensors):
    path = bundles.save(folder, material(tensors), torch.float32, golden={}, outputs={})
    return bundles.load_bundle(path).inputs


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_bundle_is_read_as_it_was_written(tmp_path):
    path = saved(tmp_path, causes=[{"id": "scale_bias", "score": 0.9}], stage="y")
    assert path.parent == tmp_path and path.name.startswith("mul-rows_T=3,D=4-")
    bundle = bundles.load_bundle(path)
    assert set(bundle.inputs) == {"x", "w"} and bundle.scalars == {"eps": 0.5}
    assert bundle.meta["causes"] == [{"id": "scale_bias", "score": 0.9}] and bundle.meta["stage"] == "y"
    assert bundle.meta["sizes"] == {"T": 3, "D": 4} and bundle.meta["versions"]["torch"] == torch.__version__
    assert {"y", "x.grad", "w.grad"} <= set(bundle.outputs)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    assert saved(tmp_path, bundle.inputs | bundle.scalars, causes=bundle.meta["causes"], stage="y") == path


def by_position(*arguments):
    x, eps, b = arguments
    return (x - b) * eps * 1.5


def test_inputs_and_scalars_come_back_in_the_order_of_the_case(tmp_path):
    """A kernel without a readable signature gets them in this order, and the first wrong gradient is named by it."""
    cases = {"x": torch.randn(3, 4), "eps": 0.5, "b": torch.randn(3, 4)}
    of = assay.Target(by_position, lambda x, eps, b: (x - b) * eps, cases=cases, name="by_position")
    diagnosis = assay.diagnose(of, out=tmp_path, probes="quick")
    bundle = assay.load_bundle(diagnosis.bundle)
    assert list(bundle.supply) == list(cases) and list(bundle.inputs) == ["x", "b"]
    assert replay(diagnosis.bundle, of).environment["replay"]["answer"] == "reproduced"


def test_a_replay_names_the_same_one_of_two_wrong_gradients(tmp_path):
    def flipped(g, t, x, y, grad_y):
        return {"x": -grad_y, "t": grad_y, "g": -grad_y}

    def sum_of(x, t, g):
        return x - t + g

    cases = {"x": torch.randn(5, 3), "t": torch.randn(5, 3), "g": torch.randn(5, 3)}
    of = assay.Target(sum_of, sum_of, cases=cases, backward=flipped, name="flipped")
    diagnosis = assay.diagnose(of, out=tmp_path, probes="quick")
    again = assay.Target(sum_of, sum_of, cases=assay.load_bundle(diagnosis.bundle).supply, backward=flipped)
    assert diagnosis.first_wrong_stage == assay.diagnose(again, probes="quick").first_wrong_stage == "x.grad"


@pytest.mark.parametrize("order", ["x", ["x", "z"], [["x"]], {"x": 0}, 3])
def test_an_order_of_other_names_is_refused(tmp_path, order):
    file = saved(tmp_path) / "bundle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"order": order}))
    with pytest.raises(ValueError, match="'order' names something else than inputs and scalars"):
        bundles.load_bundle(file.parent)


PAYLOADS = [0x7FC00001, 0xFFABCDEF - 2**32, 0x7F800001, 0x80000000 - 2**32, 1]


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[1:, 1:3],
        lambda t: t[1:],
        lambda t: t[:1].expand(6, 4),
        lambda t: t[0, 0],
        lambda t: t[:0],
    ],
    ids=["dense", "transposed", "stepped", "sliced", "offset", "expanded", "scalar", "empty"],
)
def test_bits_strides_and_offsets_survive(tmp_path, layout):
    whole = torch.randint(-(2**31), 2**31 - 1, (5, 4), dtype=torch.int32)
    whole[:, 1] = torch.tensor(PAYLOADS, dtype=torch.int32)
    value = layout(whole.view(torch.float32))
    back = stored(tmp_path, {"x": value})["x"]
    assert (back.shape, back.stride(), back.dtype) == (value.shape, value.stride(), value.dtype)
    assert back.storage_offset() == value.storage_offset() or not value.numel()
    assert torch.equal(bits(back), bits(value))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "bfloat16", "float64", "complex64"])
def test_every_dtype_comes_back(tmp_path, dtype):
    value = torch.randint(0, 2, (3, 4)).to(getattr(torch, dtype))
    for view in (value, value.t()):
        back = stored(tmp_path, {"x": view})["x"]
        assert back.dtype == view.dtype and torch.equal(back, view) and back.stride() == view.stride()


def test_inputs_that_share_memory_share_it_again(tmp_path):
    whole = torch.randn(4, 6)
    back = stored(tmp_path, {"a": whole[:, :4], "b": whole[:, 2:], "c": torch.randn(2)})
    back["a"][0, 2] = 42.0
    assert back["b"][0, 0] == 42.0
    assert back["c"].untyped_storage().data_ptr() != back["a"].untyped_storage().data_ptr()


def test_only_the_used_part_of_a_far_larger_storage_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "TRIM", 1024)
    whole = torch.randn(1 << 16)
    value = whole[1001:1201:2]
    path = bundles.save(tmp_path, material({"x": value}), torch.float32, golden={}, outputs={})
    assert (path / "inputs.safetensors").stat().st_size < 4096
    back = bundles.load_bundle(path).inputs["x"]
    assert torch.equal(back, value) and back.stride() == (2,)


def test_scalars_come_back_bit_for_bit(tmp_path):
    scalars = {"a": 0.1, "b": math.inf, "c": True, "d": 3, "e": "ieee", "f": None, "g": (1, 2.5), "h": torch.bfloat16}
    bundle = bundles.load_bundle(
        bundles.save(tmp_path, material(scalars | {"n": math.nan}), torch.float32, golden={}, outputs={})
    )
    assert math.isnan(bundle.scalars.pop("n")) and bundle.scalars == scalars
    assert bundle.scalars["c"] is True and type(bundle.scalars["d"]) is int


def test_outputs_beyond_the_limit_are_left_out_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "LIMIT", 16)
    path = saved(tmp_path)
    bundle = bundles.load_bundle(path)
    assert bundle.outputs == {} and bundle.meta["left_out"] == ["outputs"]
    assert not (path / "outputs.safetensors").exists() and set(bundle.inputs) == {"x", "w"}


@pytest.mark.parametrize("umask, modes", [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600)), (0o002, (0o775, 0o664))])
def test_a_bundle_has_the_file_modes_of_the_umask(tmp_path, umask, modes):
    before = os.umask(umask)
    try:
        path = saved(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == modes[0]
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {modes[1]}


def test_a_replay_says_that_the_bundle_is_of_another_target(tmp_path):
    path = saved(tmp_path)
    other = assay.Target(wrong, golden, cases=plain(), name="other")
    text = [replay(path, of).notes[0].text for of in (other, target())]
    assert text[0].endswith("the bundle is of the target 'mul', and this one is 'other'")
    assert "the bundle is of" not in text[1]


# hostile bundles


def change(path, edit):
    meta = json.loads((path / "bundle.json").read_text())
    edit(meta)
    (path / "bundle.json").write_text(json.dumps(meta))


def entry(**values):
    return lambda meta: meta["tensors"]["inputs"]["x"].update(values)


@pytest.mark.parametrize(
    "edit, says",
    [
        (entry(offset=1), "leave its 48 bytes"),
        (entry(shape=[4, 4]), "leave its 48 bytes"),
        (entry(stride=[5, 1]), "leave its 48 bytes"),
        (entry(stride=[2**61, 1]), "leave its 48 bytes"),
        (entry(dtype="float64"), "leave its 48 bytes"),
        (entry(shape=[0, 4], offset=2**40), "leave its 48 bytes"),
        (entry(stride=[-4, 1]), "whole numbers from 0"),
        (entry(offset=-1), "whole numbers from 0"),
        (entry(offset=True), "whole numbers from 0"),
        (entry(shape=[3.0, 4]), "whole numbers from 0"),
        (entry(shape="34"), "whole numbers from 0"),
        (entry(shape=[2**63, 1]), "whole numbers from 0"),
        (entry(shape=[2**40, 4], stride=[0, 1]), "at most"),
        (entry(shape=[3]), "1 sizes with 2 strides"),
        (entry(dtype="object"), "dtype 'object'"),
        (entry(dtype=["float32"]), "dtype"),
        (entry(dtype="bool", shape=[1], stride=[1]), "its dtype is bool"),
        (entry(key="../outputs"), "does not hold"),
        (entry(key=["x"]), "does not hold"),
        (lambda m: m.update(schema=2), "schema 2"),
        (lambda m: m.update(schema=True), "schema True"),
        (lambda m: m.pop("seed"), "'seed' is missing"),
        (lambda m: m.update(seed=-1), "seed -1 or threads .* out of range"),
        (lambda m: m.update(seed=10**400), "seed of more than 64 bits or threads .{1,6} out of range$"),
        (lambda m: m.update(schema=10**400), r"schema 10{79}; this version"),
        (entry(shape=[2**33, 2], stride=[0, 0]), "repeats its 48 bytes to 68719476736 in a dense copy; at most"),
        (lambda m: m.update(order=["x", "w", "x"]), "'order' names something twice"),
        (lambda m: m.update(threads=10**9), "out of range"),
        (lambda m: m.update(dtype="os.system"), "dtype 'os.system'"),
        (lambda m: m.update(left_out=["inputs"]), "left_out"),
        (lambda m: m.update(left_out=[["inputs"]]), "left_out"),
        (lambda m: m.update(tensors={}), "has no entry"),
        (lambda m: m["tensors"].update(inputs=[1]), "has no entry"),
        (lambda m: m["tensors"]["inputs"].update(x=3), "does not hold"),
        (lambda m: m["scalars"].update(eps={"eval": "1"}), "scalars.eps"),
        (lambda m: m["scalars"].update(eps={"float": "zz"}), "scalars.eps"),
        (lambda m: m["scalars"].update(eps={"dtype": []}), "scalars.eps"),
        (lambda m: m["scalars"].update(x=1), "an input and a scalar"),
        (lambda m: m.update(layouts={"x": 1}), "layouts"),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused_with_the_reason(tmp_path, edit, says):
    path = saved(tmp_path)
    change(path, edit)
    with pytest.raises(ValueError, match=says):
        bundles.load_bundle(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"schema": 1e999}', '{"schema": NaN}', "\udcff"], ids=range(7)
)
def test_invalid_json_is_refused(tmp_path, text):
    path = saved(tmp_path)
    (path / "bundle.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"bundle\.json"):
        bundles.load_bundle(path)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_broken_tensor_file_is_refused(tmp_path, cut):
    path = saved(tmp_path)
    file = path / "inputs.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"inputs\.safetensors"):
        bundles.load_bundle(path)


def test_a_missing_file_a_link_and_no_folder_are_refused(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(ValueError, match="has no file"):
        bundles.load_bundle(tmp_path / "nosuch")
    shutil.copy(path / "inputs.safetensors", tmp_path / "elsewhere")
    (path / "inputs.safetensors").unlink()
    (path / "inputs.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"has no file inputs\.safetensors"):
        bundles.load_bundle(path)


def test_reading_imports_nothing_that_a_bundle_names(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = saved(tmp_path / "out")
    change(path, lambda meta: meta.update(target="trap:target", case="trap", stage="trap"))
    assert bundles.load_bundle(path).meta["target"] == "trap:target"


# replay


def test_a_replay_reproduces_bit_for_bit(tmp_path):
    report = replay(saved(tmp_path), target())
    assert report.verdict == "fail" and report.environment["replay"]["answer"] == "reproduced"
    assert report.notes[0].text.startswith("reproduced: the verdict was fail, here it is fail")
    assert report.environment["replay"]["versions"] == {}


def test_a_repaired_kernel_does_not_reproduce(tmp_path):
    report = replay(saved(tmp_path), target(golden))
    assert report.ok and report.environment["replay"]["answer"] == "not reproduced"


def test_another_mistake_on_the_same_inputs_differs(tmp_path):
    report = replay(saved(tmp_path), target(lambda x, w, eps: x * w - eps))
    assert report.environment["replay"]["answer"] == "differs" and "y" in report.environment["replay"]["bits"]


def test_the_candidate_sees_the_layout_that_was_saved(tmp_path):
    seen = []

    def looks(x, w, eps):
        seen.append(x.stride())
        return wrong(x, w, eps)

    supply = plain() | {"x": torch.randn(4, 3).t()}
    path = saved(tmp_path, supply, target(looks))
    seen.clear()
    assert replay(path, target(looks)).environment["replay"]["answer"] == "reproduced"
    assert (1, 3) in seen and seen[-1] == (1, 3)


def test_a_replay_lists_differing_versions(tmp_path):
    path = saved(tmp_path)
    change(path, lambda meta: meta["versions"].update(torch="1.0"))
    report = replay(path, target())
    assert report.environment["replay"]["versions"] == {"torch": ["1.0", torch.__version__]}
    assert f"torch was 1.0, here {torch.__version__}" in report.notes[0].text
