"""merge into quantised bases: decoded exactly, then peft's merge; codes are copied only where the config fits them."""

import pytest
import torch
from safetensors.torch import load_file

from hf import checkpoints, gguf_files, models
from hf.test_merging import by_peft, differences, loaded

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.merging.merged_model import merge

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")


def quantised_and_adapter(root, kind):
    """(quantised base, the floats that it represents, adapter)"""
    folder, plain = checkpoints.quantised(root / "base", kind, "qwen3_moe")
    plain.save_pretrained(root / "floats")
    models.with_peft(plain, rank=3, target_modules=["o_proj"]).save_pretrained(root / "adapter")
    return folder, root / "floats", root / "adapter"


@pytest.mark.parametrize("kind", ["gptq", "gptq_order", "gemv", "fp8_tensor", "modelopt_nvfp4", "k2"])
def test_a_quantised_base_merged_in_floats_is_pefts_merge_of_its_numbers(kind, tmp_path):
    base, floats, adapter = quantised_and_adapter(tmp_path, kind)
    merge(base, adapter, tmp_path / "out", format="fp32")
    wanted = by_peft(floats, adapter, torch.float32)
    assert not differences(loaded(tmp_path / "out", torch.float32).state_dict(), wanted)


@pytest.mark.parametrize("kind", ["gptq", "gemv", "modelopt_nvfp4", "k2"])
def test_codes_that_cannot_be_written_again_are_refused_by_name(kind, tmp_path):
    """Also Kimi-K2's int4 in groups of 16: what `merge` writes says 32."""
    base, _, adapter = quantised_and_adapter(tmp_path, kind)
    with pytest.raises(
        ValueError, match=r"base holds codes \(.*\), which cannot be written again: give format= one of"
    ):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_codes_in_blocks_of_fp8_are_copied_where_the_adapter_changes_nothing(tmp_path):
    base, _, _ = quantised_and_adapter(tmp_path, "fp8")
    models.with_peft(models.model("qwen3_moe", moe_intermediate_size=32, intermediate_size=48), rank=3).save_pretrained(
        tmp_path / "experts_alone"
    )
    report = merge(base, tmp_path / "experts_alone", tmp_path / "out")
    assert report.format == "fp8_block"
    before = {k: t for path in base.glob("*.safetensors") for k, t in load_file(path).items() if "o_proj" in k}
    after = {k: t for path in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(path).items()}
    assert before and all(torch.equal(t.view(torch.uint8), after[k].view(torch.uint8)) for k, t in before.items())


@pytest.mark.parametrize("kind, dtype", [("Q4_0", "fp32"), ("Q4_K", "fp32"), ("F32", "bf16")])
def test_a_gguf_file_merged_in_floats_is_pefts_merge_of_its_numbers(kind, dtype, tmp_path):
    plain = models.model("qwen3_moe", mlp_only_layers=[], moe_intermediate_size=256, hidden_size=256)
    kinds = dict.fromkeys(("gate", "up", "down"), gguf_files.Type[kind])
    file = gguf_files.write(tmp_path / "m.gguf", plain, kinds)  # and plain has the file's numbers now
    plain.save_pretrained(tmp_path / "floats")
    models.with_peft(plain, rank=3, target_modules=["o_proj"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"m.gguf holds codes \(gguf\), which cannot be written again: give"):
        merge(file, tmp_path / "adapter", tmp_path / "out")
    report = merge(file, tmp_path / "adapter", tmp_path / "out", format=dtype)
    wanted = by_peft(tmp_path / "floats", tmp_path / "adapter", torch.float32)
    form = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    wanted = {name: tensor.to(form) for name, tensor in wanted.items()}
    assert not differences(loaded(tmp_path / "out", form).state_dict(), wanted) and report.merged == 6


def test_a_gguf_file_of_gpt_oss_is_merged_with_its_biases(tmp_path):
    plain = models.model("gpt_oss", hidden_size=64, intermediate_size=64)
    plain.config.save_pretrained(tmp_path)
    file = gguf_files.write(tmp_path / "m.gguf", plain)
    models.with_peft(plain, rank=3).save_pretrained(tmp_path / "adapter")
    plain.save_pretrained(tmp_path / "floats")
    merge(file, tmp_path / "adapter", tmp_path / "out", format="fp32")
    wanted = by_peft(tmp_path / "floats", tmp_path / "adapter", torch.float32)
    assert not differences(loaded(tmp_path / "out", torch.float32).state_dict(), wanted)
