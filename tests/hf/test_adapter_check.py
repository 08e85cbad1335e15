"""adapter check: it says what a runtime does with an adapter, for every mistake that it knows."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from cli.finetune_tools import saved_model, tiny_tokenizer
from goldsmith.hf.adapter_check import check as checking
from goldsmith.hf.adapter_check import runtimes
from goldsmith.hf.adapter_check.mistakes import ARRIVES, MISTAKES
from hf import checkpoints, gguf_files, models

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
TEXT = "Shall I compare thee to a summer's day? Thou art more lovely."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and an adapter on experts and attention with a pattern, written by stock peft."""
    place = tmp_path_factory.mktemp("check")
    base = saved_model(place / "model")
    plain = models.transformers.AutoModelForCausalLM.from_pretrained(base)
    patterns = {"alpha_pattern": {"mlp.experts.down_proj": 9}, "target_modules": ["o_proj"]}
    models.with_peft(plain, rank=3, alpha=5, **patterns).save_pretrained(place / "adapter")
    return base, place / "adapter"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "check-cache"))


@pytest.fixture(scope="module")
def effects(folders, tmp_path_factory):
    """(the trained model's effect, {mistake: its effect})"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "check-cache"))
        rows = checking.rows_of(folders[0], TEXT)
        without, with_adapter = runtimes.trained(*folders, rows)
        return with_adapter - without, checking._mistakes(*folders, rows)


def test_our_engine_peft_and_the_merged_model_apply_the_adapter(folders):
    result = checking.check(*folders, text=TEXT, which=("ours", "peft", "merged"))
    assert result.ok and result.effect > 0 and {f.verdict for f in result.findings} == {ARRIVES}
    assert all(0.9 < finding.share < 1.1 for finding in result.findings)


def test_every_mistake_is_named_from_its_numbers_alone(effects):
    wanted, mistakes = effects
    assert mistakes.keys() == MISTAKES.keys() - {"interleaving"} | ({"interleaving"} & mistakes.keys())
    for name, effect in mistakes.items():
        finding = checking.judge("some", effect + 0.05 * wanted.norm() * torch.randn(len(wanted)) / len(wanted) ** 0.5,
                                 wanted, mistakes)  # fmt: skip
        assert finding.verdict == name and finding.wrong and finding.text == MISTAKES[name][0]
    assert checking.judge("some", 0.8 * wanted, wanted, mistakes).verdict == "partly"
    assert checking.judge("some", wanted * float("nan"), wanted, mistakes).verdict == "failed"
    assert not checking.judge("some", wanted, wanted, mistakes).wrong


def test_a_merged_folder_that_equals_the_base_drops_the_adapter(folders):
    result = checking.check(*folders, text=TEXT, which=("merged",), merged=folders[0])
    assert not result.ok and result.findings[0].verdict == "dropped"
    assert result.to_dict()["runtimes"][0]["share"] == pytest.approx(0, abs=1e-6)


def peft_numbers(folder, adapter, rows, scale=1.0):
    """Log-probabilities of stock peft, as another runtime would give them."""
    model = models.transformers.AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = models.peft.PeftModel.from_pretrained(model, adapter)
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: value * scale for name, value in module.scaling.items()}
    numbers = iter(runtimes.log_probabilities(model.eval(), rows).tolist())
    return [[next(numbers) for _ in row[1:]] for row in rows]


def pretend_vllm(monkeypatch, scale=1.0):
    """A module `vllm` with the part of its interface that the check uses."""

    class LLM:
        def __init__(self, *, model, enable_lora, max_lora_rank, **options):
            assert enable_lora and max_lora_rank == 8
            self.model = model

        def generate(self, prompts, sampling, *, lora_request, use_tqdm):
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            path = None if lora_request is None else lora_request.lora_path
            for row, numbers in zip(rows, peft_numbers(self.model, path, rows, scale)):
                entries = [{token: SimpleNamespace(logprob=n)} for token, n in zip(row[1:], numbers)]
                yield SimpleNamespace(prompt_logprobs=[None, *entries])

    top, lora, request = (ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    top.LLM, top.SamplingParams = LLM, lambda **options: options
    request.LoRARequest = lambda name, number, path: SimpleNamespace(lora_path=path)
    for module in (top, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object())


def pretend_sglang(monkeypatch):
    class Engine:
        def __init__(self, *, model_path, enable_lora, lora_paths, **options):
            self.model, self.paths = model_path, lora_paths

        def generate(self, *, input_ids, lora_path, return_logprob, logprob_start_len, sampling_params):
            assert return_logprob and logprob_start_len == 0
            path = None if lora_path[0] is None else self.paths[lora_path[0]]
            for row, numbers in zip(input_ids, peft_numbers(self.model, path, input_ids)):
                entries = [(None, row[0], None), *((n, token, None) for n, token in zip(numbers, row[1:]))]
                yield {"meta_info": {"input_token_logprobs": entries}}

        def shutdown(self):
            pass

    module = ModuleType("sglang")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang", module)


def test_vllm_and_sglang_are_asked_for_the_log_probability_of_each_token(folders, monkeypatch):
    pretend_vllm(monkeypatch)
    pretend_sglang(monkeypatch)
    result = checking.check(*folders, text=TEXT, which=("vllm", "sglang"))
    assert result.ok, result


def test_a_runtime_that_scales_the_adapter_down_is_found_out(folders, monkeypatch):
    pretend_vllm(monkeypatch, scale=1 / 60)  # the experts' effect was 0.018 in place of 0.68 in vLLM's issue 41384
    (finding,) = checking.check(*folders, text=TEXT, which=("vllm",)).findings
    assert finding.wrong and finding.share < 0.1


def test_a_missing_runtime_and_one_that_refuses_are_distinguished(folders, monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    (missing,) = checking.check(*folders, text=TEXT, which=("sglang",)).findings
    assert missing.verdict == "missing" and not missing.wrong and "not installed" in missing.text

    def refuses(*arguments):
        raise ValueError("expected target modules in {'qkv_proj'}")

    monkeypatch.setitem(checking.RUNTIMES, "vllm", refuses)
    (failed,) = checking.check(*folders, text=TEXT, which=("vllm",)).findings
    assert failed.verdict == "failed" and "expected target modules" in failed.text


@pytest.mark.parametrize("options, text", [
    ({"which": ("llama.cpp",)}, "runtime 'llama.cpp' is unknown; known: ours, peft, merged, vllm, sglang"),
    ({"text": ""}, "fewer than two tokens"),
], ids=["runtime", "text"])  # fmt: skip
def test_wrong_arguments_are_refused(folders, options, text):
    with pytest.raises(ValueError, match=text):
        checking.check(*folders, **options)


def test_an_adapter_without_an_effect_is_refused(folders, tmp_path):
    plain = models.transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    config = models.peft.LoraConfig(target_parameters=list(models.EXPERTS), r=3)
    models.peft.get_peft_model(plain, config).save_pretrained(tmp_path)  # B is 0
    with pytest.raises(ValueError, match="it changes no log-probability"):
        checking.check(folders[0], tmp_path, text=TEXT, which=("ours",))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", ["gptq", "fp8", "gguf"])
def test_an_adapter_on_a_base_whose_codes_are_kept_is_checked(kind, tmp_path):
    """Without the libraries of these formats: stock peft runs over the numbers that the codes stand for."""
    sizes = {"mlp_only_layers": [], "vocab_size": 272, "max_position_embeddings": 256}
    if kind == "gguf":
        plain = models.model("qwen3_moe", **sizes, moe_intermediate_size=32)
        kinds = dict.fromkeys(("gate", "up", "down"), gguf_files.Type.Q8_0)
        base = gguf_files.write(tmp_path / "m.gguf", plain, kinds, fields=gguf_files.byte_tokenizer())
    else:
        base, plain = checkpoints.quantised(tmp_path / "base", kind, "qwen3_moe", **sizes)
        tiny_tokenizer().save_pretrained(base)
    models.with_peft(plain, rank=3, alpha=5).save_pretrained(tmp_path / "adapter")
    result = checking.check(base, tmp_path / "adapter", text=TEXT, which=("ours", "peft", "merged"))
    assert {f.runtime: f.verdict for f in result.findings} == dict.fromkeys(("ours", "peft", "merged"), ARRIVES)


def test_numbers_that_nothing_explains_accuse_no_runtime_of_a_mistake(effects):
    wanted, mistakes = effects
    noise = torch.randn(len(wanted), generator=torch.Generator().manual_seed(0)).to(wanted)
    noise *= 1.4 * wanted.norm() / noise.norm()
    noise -= (noise @ wanted + 0.7 * wanted.norm() ** 2) / wanted.norm() ** 2 * wanted
    finding = checking.judge("some", wanted + noise, wanted, mistakes)
    assert (finding.verdict, finding.wrong) == ("unclear", True) and "rounding" in finding.text
