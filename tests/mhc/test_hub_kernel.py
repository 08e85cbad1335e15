"""The folder for the Hub's `kernels` package: generated, loaded by it without a network, and used by a model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from goldsmith import mhc
from goldsmith.mhc import layers
from mhc.networks import gradients
from mhc.wrong import equal

kernels = pytest.importorskip("kernels")
ROOT = Path(__file__).resolve().parents[2]
N, DIM = 2, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "goldsmith-mhc"
    subprocess.run([sys.executable, ROOT / "scripts/hub_kernel.py", path], check=True)
    return path


@pytest.fixture(scope="module")
def package(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", None)  # a connection fails
        return kernels.get_local_kernel(folder)


def test_kernel_builder_reads_the_folder_and_both_variants_hold_the_same_sources(folder):
    from kernels._rust import Build

    assert [str(b) for b in Build.open(folder).general.backends] == ["cpu", "cuda"]
    source = folder / "torch-ext" / "goldsmith_mhc"
    files = sorted(p.relative_to(source) for p in source.rglob("*.py"))
    assert Path("mhc/pre/_triton.py") in files and not any("cases" in p.name or "assay" in p.parts for p in files)
    for variant in ("torch-cpu", "torch-cuda"):
        built = folder / "build" / variant
        assert sorted(p.relative_to(built) for p in built.rglob("*.py")) == files
        assert all((built / p).read_bytes() == (source / p).read_bytes() for p in files)


def test_the_folder_needs_only_torch_and_triton(folder):
    """In a process that cannot import goldsmith, numpy, rich or typer."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "sys.modules.update(dict.fromkeys(('goldsmith', 'rich', 'typer', 'safetensors', 'jinja2')));"
        "import torch, goldsmith_mhc as m; x = torch.randn(2, 4, 3);"
        "print(tuple(m.HyperConnection(3, torch.tanh)(x).shape))"
    )
    command = [sys.executable, "-c", program, str(folder / "torch-ext")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "(2, 4, 3)\n"


def test_the_loaded_package_computes_the_same_bits(package):
    x, phi = torch.randn(3, N, DIM), torch.randn(8, N * DIM)
    assert set(mhc.__all__) < set(package.__all__)
    theirs, ours = (m.pre(x, phi, torch.ones(3), torch.zeros(8)) for m in (package, mhc))
    assert all(equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert package.pre is not mhc.pre


MODULES = {
    "DeepseekV4HyperConnection": ("deepseek_v4", "DeepseekV4Config", {"hc_mult": N}),
    "DeepseekV4HyperHead": ("deepseek_v4", "DeepseekV4Config", {"hc_mult": N}),
    "HYV4HyperConnection": ("hy_v4", "HYV4Config", {"hc_mult": N, "hc_magnitude": 1.5}),
    "Qwen4ExpTextGatedResidual": ("qwen4_exp", "Qwen4ExpTextConfig", {"hc_count": N, "hc_lowrank": 3}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE"])
def test_kernelize_replaces_the_forward_of_transformers_modules(folder, package, name, mode):
    """The layer runs our operator on the model's own weights, with gradients; the module keeps its place."""
    family, config, sizes = MODULES[name]
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    replaced = type(name, (getattr(modeling, name),), {})  # the installed class stays as it is
    kernels.replace_kernel_forward_from_hub(replaced, name)
    model = nn.Sequential(replaced(getattr(modeling, config)(hidden_size=DIM, **sizes)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    repository = kernels.LocalLayerRepository(folder, layer_name=name)
    mapping = {name: {torch.device(DEVICE).type: repository}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernelized = kernels.kernelize(model, mode=getattr(kernels.Mode, mode), device=DEVICE, use_fallback=False)
    layer = getattr(package.layers, name)
    assert kernelized[0].forward.__func__ is layer.forward
    x = torch.randn(2, 3, N * DIM) if family == "qwen4_exp" else torch.randn(2, 3, N, DIM)
    first = lambda results: results if isinstance(results, torch.Tensor) else results[0]  # noqa: E731
    theirs = gradients(lambda x: first(kernelized(x)), x, [])
    ours = gradients(lambda x: first(getattr(layers, name).forward(model[0], x)), x, [])
    assert all(equal(a, b) for a, b in zip(theirs, ours, strict=True))


DEVICE = "cpu"
