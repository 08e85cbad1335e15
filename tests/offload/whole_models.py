"""Helpers for tests of offloaded models: text compared up to ties, and budgets in units of a store."""

from types import SimpleNamespace

import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.offload.planning.costs import Costs
from hf import goldens, models

FAMILIES = [*models.FAMILIES, *models.MORE]
# of an imaginary machine, so that plans do not depend on this one's speed
COSTS = Costs(
    expert_bytes=10_000, flops_per_token=20_000, cpu_bytes_per_s=1e10, cpu_flops=1e11, link_bytes_per_s=2e10,
    dram_bytes_per_s=3e10, device_bytes_per_s=1e12, device_flops=1e13, cpu_latency=1e-6, link_latency=1e-6,
    device_latency=1e-6,
)  # fmt: skip
CALIBRATION = SimpleNamespace(costs=COSTS)


def expert_parameters(model):
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


def check_alike(ours, plain):
    """Compares the logits with the plain model's in float64; neither has gradients."""
    wide = goldens.InItsDtype(plain)

    def draw(make):
        return {"embeds": make.normal(2, 3, plain.config.hidden_size)}

    target = assay.Target(
        lambda embeds: goldens.logits_of(ours, {}, embeds),
        lambda embeds: wide.logits(embeds, {}),
        cases=[Case("logits", draw, {})],
        name=plain.config.model_type,
        backward=None,
    )
    assay.check(target, probes=["values", "ensemble"])


def greedy(model, ids, steps=6, **options):
    """(ids [B, T + steps], logits [steps, B, V]) of greedy generation without end tokens."""
    generated = model.generate(
        ids,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return generated.sequences, torch.stack(generated.logits)


def assert_same_text(plain, ours, ids, *, steps=6, **options):
    """The same ids, except at ties: where the two best logits are closer than the plain model's error from float64.

    At the first difference of a row both models have read the same tokens; the rest is another text and is not
    compared.
    """
    assert_same_ids(plain, greedy(ours, ids, steps, **options)[0], ids, steps=steps, **options)


def assert_same_ids(plain, value, ids, *, steps, **options):
    """`assert_same_text` for given ids [B, T + steps]."""
    theirs, logits = greedy(plain, ids, steps, **options)
    for row in range(len(ids)):
        different = (theirs[row] != value[row]).nonzero()
        if len(different):
            at = int(different[0])
            there = logits[at - ids.shape[1], row].double()
            exact = wide_logits(plain, theirs[row, :at], options.get("attention_mask"), row)
            noise = float((there - exact).abs().max())
            margin = float(exact[theirs[row, at]] - exact[value[row, at]])
            assert margin <= 2 * noise, (
                f"row {row}, token {at}: {int(value[row, at])} for {int(theirs[row, at])}, whose logit is {margin:.3g} "
                f"higher, where the plain model's own are within {noise:.3g}"
            )


def wide_logits(plain, ids, mask, row):
    """The logits after these ids from the float64 model; for a padded row without its padding."""
    if mask is not None:
        ids = ids[int((mask[row] == 0).sum()) :]
    wide = goldens.InItsDtype(plain)
    with torch.no_grad():
        return wide.outputs(torch.float64, {}, {"input_ids": ids[None], "use_cache": False}).logits[0, -1].double()


def slots(model, count):
    """A budget for `count` experts of a store with so many layers and blocks of 4096 bytes."""
    form = next(m for n, m in model.named_modules() if n.endswith("mlp.experts"))
    numbers = sum(p[0].numel() * p.element_size() for p in form.parameters())
    return count * (-(-numbers // 4096) + 2) * 4096


def padded(rows=3, length=6):
    """ids and mask of a batch with padding on the left."""
    ids = models.tokens(rows, length)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : row + 1] = 0
    return ids.masked_fill(mask == 0, 0), mask
