"""torch's default dtype and device change nothing: same tensors, same devices, same bits."""

import copy
import itertools

import pytest
import torch

from experts.defaults import check
from hf import checkpoints, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.training.data.documents import Document
from goldsmith.hf.training.data.packing import RowStream, batch
from goldsmith.hf.training.run.loss import summed_loss
from goldsmith.offload import attach

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
IDS = models.tokens()


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("options", [{"format": "fp32"}, {"format": "int4_asym", "group_size": 8}], ids=str)
def test_a_converted_model_trains_and_goes_through_its_files(family, options, tmp_path):
    plain = models.model(family)

    def padded():
        torch.manual_seed(0)
        return models.peft.get_peft_model(copy.deepcopy(plain), models.peft.LoraConfig(target_modules=["o_proj"], r=2))

    def work(model):
        torch.manual_seed(0)
        hf.convert(model, **options, lora={"rank": 3, "dropout": 0.1})
        began = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.add_(0.1)
        loss = model.train()(IDS, labels=IDS).loss
        loss.backward()
        hf.save_adapter(model, tmp_path)
        before = dict(model.named_parameters())
        hf.load_adapter(model, tmp_path)
        kept = [name for name, p in model.named_parameters() if p is before[name]]
        again = hf.load_adapter(hf.convert(copy.deepcopy(plain), **options), tmp_path)
        logits = [m.eval()(IDS).logits for m in (model, again)]
        return began, kept, loss, [p.grad for p in model.parameters() if p.grad is not None], logits

    check(work, padded)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_registered_experts_implementation_computes(family):
    plain = models.model(family)

    def work(model):
        hf.register(model)
        return model(IDS).logits

    check(work, lambda: copy.deepcopy(plain))


@pytest.mark.parametrize("kind, family", [("k2", "deepseek_v3"), ("awq", "qwen3_moe"), ("fp8", "deepseek_v3")])
def test_a_checkpoint_is_streamed(kind, family, tmp_path):
    folder, _ = checkpoints.quantised(tmp_path, kind, family)

    def padded():
        config = models.transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return models.transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def work(model):
        hf.convert(model, checkpoint=folder)
        return model.eval()(IDS).logits

    check(work, padded)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("lanes", ["cpu", "copied", "cached"])
def test_an_offloaded_model_computes(family, lanes, tmp_path, monkeypatch):
    models.model(family).save_pretrained(tmp_path / "model")
    caches = (str(tmp_path / str(number)) for number in itertools.count())

    def work(_):
        monkeypatch.setenv("GOLDSMITH_CACHE", next(caches))  # a new store for each call
        budget = {} if lanes == "cpu" else {"gpu_budget": "1MiB"}
        with attach.from_pretrained(tmp_path / "model", device="cpu", lanes=lanes, **budget) as offloaded:
            return offloaded.model(IDS).logits, offloaded.model(IDS[:1, :1]).logits

    check(work)


def test_packed_rows_and_their_loss():
    plain = models.model("qwen3_moe")
    documents = [Document([k % 48 for k in range(n)], [True] * n, True) for n in (5, 9, 3)]

    def work(_):
        rows = RowStream(documents, 16, packed=True, seed=1).rows
        padded = batch([[documents[k] for k in row] for row in rows], pad=0)
        return rows, padded.input_ids, padded.position_ids, padded.labels, summed_loss(plain, padded)

    check(work)
