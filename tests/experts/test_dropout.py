"""The dropout masks of LoRA: Philox bit for bit, and what the masks depend on."""

import pytest
import torch
import torch._inductor.config

from goldsmith import Op, experts
from goldsmith.experts import dropout

pytestmark = pytest.mark.sweep(2)

# known answers of Random123 for philox4x32-10: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_philox_gives_the_known_answers(counter, key, result):
    words = dropout.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == result


def plainly(seed, projection, token, slot, feature, p):
    """The docstring's definition in Python integers."""
    k0, k1 = seed % 2**32, seed // 2**32 % 2**32
    c = [feature // 4, token, slot, projection]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k0, b % 2**32, a >> 32 ^ c[3] ^ k1, a % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c[feature % 4] >= int(p * 2**32 + 0.5)


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -1, -(2**63), 1234567890123])
def test_masks_follow_the_documented_definition(seed):
    tokens, slots = torch.tensor([0, 3, 2**31 + 5]), torch.tensor([1, 0, 7])
    for projection in range(3):
        kept = dropout.kept(seed, projection, tokens, slots, 11, 0.3)
        for row, (t, j) in enumerate(zip(tokens.tolist(), slots.tolist(), strict=True)):
            assert kept[row].tolist() == [plainly(seed % 2**64, projection, t, j, f, 0.3) for f in range(11)]


def test_the_fraction_of_dropped_features_is_about_p():
    for p in (0.05, 0.5, 0.9):
        kept = dropout.kept(5, 1, torch.arange(1000), torch.zeros(1000, dtype=torch.int64), 100, p)
        dropped = 1 - kept.double().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / kept.numel()) ** 0.5  # five standard deviations


E, H, I, T, K = 3, 6, 5, 4, 2


def run(x, ids, w, base, lora, seed, p=0.5):
    options = dict(
        layout="", gate_scale=1.0, up_scale=1.0, down_scale=1.0, dropout=p, activation="silu", alpha=1.0, limit=None,
        save=True,
    )  # fmt: skip
    return Op.get("experts.moe")(
        x, ids, w, *base, None, None, *lora, torch.tensor(seed), **options, backend="reference"
    )


def test_a_mask_depends_on_token_slot_and_projection_not_on_the_expert():
    """If all experts have the same weights, a route's output does not depend on its expert."""
    torch.manual_seed(0)
    base = [t[:1].expand(E, -1, -1) for t in (torch.randn(1, 2 * I, H), torch.randn(1, H, I))]
    shapes = [(2, H), (I, 2), (2, H), (I, 2), (2, I), (H, 2)]
    lora = [torch.randn(1, *s).expand(E, -1, -1) for s in shapes]
    x, w = torch.randn(T, H, dtype=torch.float64), torch.rand(T, K, dtype=torch.float64)
    together = run(x, torch.zeros(T, K, dtype=torch.int64), w, base, lora, 3)
    # a single route at a time, so that both calls multiply exactly one row
    for e in range(E):
        ids = torch.full((T, K), -1)
        ids[2, 1] = e
        alone = run(x, ids, w, base, lora, 3)
        other = run(x, torch.where(ids < 0, -1, 0), w, base, lora, 3)
        assert torch.equal(alone, other) and alone[2].any()
    assert not torch.equal(together, run(x, torch.zeros(T, K, dtype=torch.int64), w, base, lora, 4))


def test_a_mask_does_not_depend_on_the_slices_of_the_base():

    torch.manual_seed(0)
    inputs = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    plain = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    lora = experts.LoRA(E, H, I, dropout=0.5)
    torch.nn.init.normal_(lora.down_b)
    outputs = []
    for partitions in (1, 3):
        torch.manual_seed(1)
        base = experts.pack(*plain, format="fp32", partitions=partitions)
        outputs.append(experts.moe(*inputs, base, lora=lora, backend="reference"))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("eager_numbers", [False, True])
def test_compiled_masks_repeat_for_a_seed_and_equal_eager_ones_with_fallback_random(eager_numbers):
    """As docs/experts.md says: inductor has its own random numbers unless fallback_random is set."""
    torch.manual_seed(0)
    x, ids, w = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    base, lora = (torch.randn(E, 2 * I, H), torch.randn(E, H, I)), experts.LoRA(E, H, I, dropout=0.5)
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter)

    def output_of(call):
        torch.manual_seed(3)
        with torch.no_grad():
            return call(x)

    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=eager_numbers):
        compiled = torch.compile(lambda v: experts.moe(v, ids, w, base, lora=lora, backend="reference"), fullgraph=True)
        first = output_of(compiled)
        assert torch.equal(first, output_of(compiled))
    eager = output_of(lambda v: experts.moe(v, ids, w, base, lora=lora, backend="reference"))
    assert torch.equal(first, eager) == eager_numbers
