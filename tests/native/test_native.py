"""The native library as installed: its ABI, its instruction set levels, and machines without it."""

import ctypes
import functools
import platform
import re
import shlex
import signal
import subprocess
import sys
import warnings

import pytest
import torch

from goldsmith import experts
from goldsmith.core import BackendUnavailable, native
from goldsmith.experts import _native_abi
from goldsmith.experts._arguments import base_of
from goldsmith.experts._block_codes import BlockArgs
from goldsmith.experts._conventions import NAMES
from goldsmith.offload.decoding import _native_abi as step_abi
from native.variants import library
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the native library needs Linux on x86-64"
)
HEADER = "".join((ROOT / "csrc" / name).read_text() for name in ("goldsmith.h", "experts/abi.h", "step/abi.h"))
LEVELS = native.LEVELS


def structures(kind=native.Structure):
    for declared in (step_abi.StepArgs, BlockArgs):
        assert issubclass(declared, native.Structure)  # imported here: a structure counts once it is declared
    return [kind_ for sub in kind.__subclasses__() for kind_ in (sub, *structures(sub))]


def enumeration(prefix):
    """The enum of goldsmith.h that contains the name `prefix`, as {name: number}."""
    for body in re.findall(r"enum \{(.*?)\}", HEADER, re.DOTALL):
        names = dict(re.findall(r"(\w+) = (\d+)", body))
        if prefix in names:
            return {name: int(number) for name, number in names.items()}
    raise AssertionError(f"goldsmith.h has no enum with {prefix}")


@pytest.fixture(scope="module", autouse=True)
def built():
    library()
    if native.reason() is not None:
        native._load.cache_clear()


@pytest.fixture
def fresh(monkeypatch):
    """Reloads the library as a process started with these variables does; restores the level afterwards."""
    before = native.library().gs_level()

    def load(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        native._load.cache_clear()
        return native.reason()

    yield load
    monkeypatch.undo()
    native._load.cache_clear()
    native.check(native.library().gs_set_level(before))


# -- the C ABI --------------------------------------------------------------------------------------------------------


def test_every_structure_has_the_librarys_layout():
    declared = {s._c_name_: s for s in structures()}
    assert declared.keys() == native.layout().keys()
    for name, theirs in native.layout().items():
        ours = {"": (0, ctypes.sizeof(declared[name]))}
        ours |= {
            f: (getattr(declared[name], f).offset, getattr(declared[name], f).size) for f, *_ in declared[name]._fields_
        }
        assert ours == theirs, name


def test_the_librarys_layout_table_has_every_field_of_the_header():
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, re.DOTALL):
        if name == "gs_field":
            continue
        lines = re.sub(r"//.*", "", body).split(";")
        fields = {word for line in lines for word in re.findall(r"(\w+)(?:\[\d+\])?(?=\s*(?:,|$))", line.strip())}
        assert fields == native.layout()[name].keys() - {""}, name


def test_the_enums_of_the_header_match_the_python_code():
    assert tuple(native.library().gs_level_name(i).decode() for i in range(len(LEVELS))) == LEVELS
    assert native.library().gs_level_name(len(LEVELS)) is None and native.library().gs_level_name(-1) is None
    words = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    words |= {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
    tensors = {f"GS_{word}": native.DTYPES[dtype] for word, dtype in words.items()}
    assert enumeration("GS_NONE") == tensors | {"GS_NONE": 0, "GS_E8M0": _native_abi.SCALES[torch.uint8]}
    assert enumeration("GS_READ") == {f"GS_{probe.upper()}": i for i, probe in enumerate(native.PROBES)}
    assert set(enumeration("GS_OK").values()) == {0, *native._RAISES}
    plain = {f"GS_PLAIN_{word}": _native_abi.PLAIN[words[word]] for word in ("F32", "BF16")}
    stored = {"fp32": "PACKED_F32", "bf16": "PACKED_BF16"}
    packed = {f"GS_{stored.get(name, name.upper())}": number for name, number in _native_abi.PACKED.items()}
    assert enumeration("GS_INT4") == plain | packed
    assert enumeration("GS_SILU") == {f"GS_{name.upper()}": i for i, name in enumerate(_native_abi.ACTIVATIONS, 1)}


def test_a_structure_with_another_size_is_refused():
    args = native.MeasureArgs(threads=1, what=1)
    args.size -= 8
    with pytest.raises(RuntimeError, match="different versions of goldsmith.h: run make"):
        native.check(native.library().gs_measure(ctypes.byref(args)))


def test_a_tensor_view_has_the_tensors_address_sizes_and_strides():
    tensor = torch.empty(3, 4, 5, dtype=torch.bfloat16)[:, ::2]
    three = (native.TensorView * 3)()
    native.put(tensor, three, ctypes.sizeof(native.TensorView))
    before, seen, after = three
    assert (seen.data, seen.dtype, seen.rank) == (tensor.data_ptr(), 2, 3)
    assert (list(seen.sizes), list(seen.strides)) == ([3, 2, 5, 0], [20, 10, 1, 0])
    assert bytes(before) == bytes(after) == bytes(ctypes.sizeof(native.TensorView))
    native.put(torch.tensor(1.0), three, 0)
    assert (three[0].dtype, three[0].rank, list(three[0].sizes), list(three[0].strides)) == (1, 0, [0] * 4, [0] * 4)


def test_no_level_shares_code_with_the_rest_of_the_library():
    """Of several weak functions with one name the linker keeps one, which may use instructions that the CPU lacks."""
    library()
    objects = sorted((ROOT / "build/native").rglob("csrc/isa/*.o"))
    assert {path.name.partition(".")[0] for path in objects} == set(LEVELS)
    for path in objects:
        level = path.name.partition(".")[0]
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
        weak = re.findall(r" [VWu] (?!DW\.ref\.)(.*)", listed)
        own = (f"gs::{level}::", f"NS_{len(level)}{level}")  # nm leaves some names as the compiler writes them
        weak = [name for name in weak if not any(word in name for word in own)]
        assert not weak, f"{path.name}: {weak}"


def test_code_outside_the_levels_has_no_avx_or_amx_instructions():
    library()
    paths = [
        p for p in (ROOT / "build/native").rglob("csrc/**/*.o") if p.parent.name != "isa" or p.name == "scalar.cpp.o"
    ]
    assert len(paths) > 5
    for path in paths:
        listed = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
        assert not re.search(r"%[yz]mm|%tmm", listed), path.name


# -- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS, ids="level={}".format)
def test_the_environment_variable_lowers_the_level_and_never_raises_it(level, fresh):
    highest, why = native.machine_isa()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fresh(GOLDSMITH_ISA=level.upper()) is None
        fresh()
    if LEVELS.index(level) <= LEVELS.index(highest):
        assert (native.isa(), caught) == (level, [])
    else:
        assert native.isa() == highest
        words = f"GOLDSMITH_ISA={level} is above this machine's level, {highest}, which is used instead: {why}"
        assert {str(warning.message) for warning in caught} == {words}


def test_the_error_for_an_unknown_level_lists_the_known_ones(fresh):
    with pytest.raises(
        ValueError, match="^GOLDSMITH_ISA='avx1024' is not a level; choose one of: scalar, avx2, avx512, "
    ):
        fresh(GOLDSMITH_ISA="avx1024")


def test_the_library_refuses_a_level_above_the_machines(fresh):
    highest = native.library().gs_machine_level()
    with pytest.raises(ValueError, match=f"level {highest + 1}, expected 0 to {highest} on this machine"):
        native.check(native.library().gs_set_level(highest + 1))


def test_the_command_line_reports_an_unknown_level_without_a_traceback(monkeypatch):
    from typer.testing import CliRunner

    from goldsmith.cli import app

    monkeypatch.setenv("GOLDSMITH_ISA", "sse9")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "GOLDSMITH_ISA='sse9' is not a level" in " ".join(result.output.split())


def test_below_the_highest_level_there_is_a_reason():
    highest, why = native.machine_isa()
    assert bool(why) == (highest != LEVELS[-1])


@pytest.mark.parametrize("level", LEVELS, ids="level={}".format)
def test_every_probe_of_a_level_measures_a_rate(level, fresh):
    machine = LEVELS.index(native.machine_isa()[0])
    if LEVELS.index(level) > machine:
        pytest.skip(f"this machine has no {level}")
    fresh(GOLDSMITH_ISA=level)
    has = {"fma": 0, "vnni": 3, "dot_bf16": 4, **{probe: 5 for probe in native.PROBES if probe.startswith("amx")}}
    assert has.keys() | {"read"} == set(native.PROBES)
    for probe, needs in has.items():
        if LEVELS.index(level) >= needs:
            assert native.measure(probe, threads=2, seconds=0.01) > 1e8
        else:
            with pytest.raises(BackendUnavailable, match=f"level {level} has no such instruction"):
                native.measure(probe, seconds=0.01)
    assert native.measure("read", threads=2, seconds=0.01, megabytes=1) > 1e7
    with pytest.raises(ValueError, match="bytes is 0, expected at least 4096 per thread"):
        native.measure("read", megabytes=0)


def test_the_amx_product_probes_check_their_arguments():
    if native.isa() != "amx":
        pytest.skip(f"this machine's level is {native.isa()}")
    for rows in (0, 33, -32, 1 << 21):
        with pytest.raises(ValueError, match=f"rows is {rows}, expected a multiple of 32, at most 2"):
            native.measure("amx_l2", rows=rows)
    with pytest.raises(ValueError, match="bytes is 1048576, expected at least 262144 per thread"):
        native.measure("amx_stream", threads=5, megabytes=1)
    assert native.measure("amx_stream", threads=2, seconds=0.01, megabytes=1, rows=64) > 1e8


# -- without it -------------------------------------------------------------------------------------------------------


def moe_arguments(**changes):
    """The arguments of gs_moe_forward for integer products, with some fields changed; "down.group" is in the slice."""
    base = experts.pack(torch.randn(2, 128, 64), torch.randn(2, 64, 64), format="int8", group_size=64)
    gate_up, down, _, _, layout = base_of("test", base)
    x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    tensors = {"x": x, "topk_ids": ids, "topk_weights": weights, "gate_up": gate_up, "down": down}
    options = {"layout": layout, "activation": "silu", "alpha": 1.702, "limit": None, "int8": 64}
    call = _native_abi.NativeCall(dict.fromkeys(NAMES) | tensors, options)
    call.keep("y", torch.empty(3, 64))
    slices = (_native_abi.SliceStruct * 1).from_buffer_copy(call.args.slices[0])  # the original is cached
    call.args.slices = slices
    for name, value in changes.items():
        *path, field = name.split(".")
        setattr(functools.reduce(getattr, path, slices[0]) if path else call.args, field, value)
    return call, slices


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"slots": 0}, "slots is 0, expected 1 or more"),
        ({"hidden": 0}, "hidden is 0, expected 1 or more"),
        ({"intermediate": 0}, "intermediate is 0, expected 1 or more"),
        ({"tokens": -1}, "tokens is -1, expected 0 or more"),
        ({"slots": -1, "int8": 0}, "slots is -1, expected 0 or more"),
        ({"down.group": 0}, r"a matrix of slice 0 is \[64, 64\] with 0 inputs per scale"),
        ({"gate.group": -8, "int8": 0}, "with -8 inputs per scale"),
        ({"up.cols": -1}, r"a matrix of slice 0 is \[64, -1\]"),
        ({"slice_count": -1}, "slice_count is -1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_extents_that_a_kernel_would_divide_by_are_an_error_and_no_signal(which, changes, message):
    """The C entry itself: the caller in Python checks the slots too."""
    call, _ = moe_arguments(**changes)
    with pytest.raises(ValueError, match=message):
        native.check(getattr(native.library(), f"gs_moe_{which}")(ctypes.byref(call.args)))


def test_a_slice_outside_of_the_intermediate_features_is_an_error():
    call, slices = moe_arguments()
    slices[0].end = 65
    with pytest.raises(ValueError, match=r"slice 0 is \[0, 65\), expected a part of \[0, 64\)"):
        native.check(native.library().gs_moe_forward(ctypes.byref(call.args)))


def test_the_reason_for_a_missing_library_says_how_to_get_it(fresh, tmp_path):
    reason = fresh(GOLDSMITH_LIBRARY=str(tmp_path / "none.so"))
    where = f"the native library was not built ({tmp_path}/none.so is missing); to build it, run: "
    assert reason == where + shlex.join([sys.executable, str(ROOT / "scripts/native.py")])
    with pytest.raises(BackendUnavailable, match="^native: the native library was not built"):
        native.library()
    assert native.unavailable({"x": torch.zeros(3)}) == reason


def test_auto_warns_once_that_the_library_was_not_built(fresh, tmp_path, monkeypatch):
    fresh(GOLDSMITH_LIBRARY=str(tmp_path / "none.so"))
    monkeypatch.setattr(native, "_warned", False)
    base = experts.pack(torch.randn(2, 8, 4), torch.randn(2, 4, 4), format="bf16")
    x, ids, weights = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experts.moe(x.double(), ids, weights.double(), base, backend="reference")
        assert caught == []  # asked for by name
        for _ in range(2):
            experts.moe(x, ids, weights, base)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert f"to build it, run: {sys.executable} {ROOT}/scripts/native.py" in str(warning.message)


def test_the_reason_for_a_broken_library_has_the_loaders_message(fresh, tmp_path):
    (tmp_path / "bad.so").write_text("no library")
    reason = fresh(GOLDSMITH_LIBRARY=str(tmp_path / "bad.so"))
    assert reason.startswith("the native library cannot be loaded: ") and "bad.so: " in reason


def test_another_library_is_refused(fresh):
    assert "belongs to another version" in fresh(GOLDSMITH_LIBRARY=torch._C.__file__)


def test_another_architecture_is_refused(fresh, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert fresh() == "the native library needs Linux on x86-64; this is Linux on aarch64"


def test_the_reason_for_unsupported_tensors_names_the_tensor():
    assert native.unavailable({"a": None, "x": torch.zeros(3)}) is None
    double = native.unavailable({"x": torch.zeros(3, dtype=torch.float64)})
    assert double == "x is float64, which only the reference supports"
    assert native.unavailable({"x": torch.zeros(3, device="meta")}) == "x is on meta; the native kernels run on the CPU"


def test_a_mapped_file_that_is_cut_short_ends_the_process_with_a_sentence(tmp_path):
    program = """if True:
        import ctypes, mmap, os, sys
        ctypes.CDLL(sys.argv[1]).gs_say_at_bus_error(b"It was cut short.\\n")
        file = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
        os.truncate(file, 8192)
        mapped = mmap.mmap(file, 8192)
        os.truncate(file, 0)
        mapped[4096]
    """
    command = [sys.executable, "-c", program, native.library()._name, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGBUS, "It was cut short.\n")


def test_importing_goldsmith_does_not_load_it():
    code = "import goldsmith, goldsmith.core.native as n; print(n._load.cache_info().currsize)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout.strip() == "0", done.stderr
