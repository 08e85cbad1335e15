"""torch's default device and dtype do not change results, nor where kernels write."""

import pytest
import torch

from goldsmith import experts
from goldsmith.core import native
from goldsmith.experts import _native_abi

E, H, I, T, K = 4, 64, 32, 5, 2
pytestmark = pytest.mark.skipif(native.reason() is not None, reason="the native library is not there")


@pytest.fixture(params=["meta", "bfloat16", "float64"])
def unusual(request):
    """A context manager that sets an unusual default."""

    class Dtype:
        def __enter__(self):
            self.before = torch.get_default_dtype()
            torch.set_default_dtype(getattr(torch, request.param))

        def __exit__(self, *_):
            torch.set_default_dtype(self.before)

    return torch.device("meta") if request.param == "meta" else Dtype()


@pytest.fixture
def call():
    torch.manual_seed(0)
    base = experts.pack(torch.randn(E, 2 * I, H), torch.randn(E, H, I), format="int8")
    return torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K), base


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_moe_with_gradients_and_dropout(unusual, call, backend):
    x, ids, weights, base = call
    lora = experts.LoRA(E, H, I, rank=2, dropout=0.5)
    torch.nn.init.normal_(lora.gate_b)
    dy = torch.ones(T, H)

    def results():
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = experts.moe(leaf, ids, weights, base, lora=lora, backend=backend)
        return [y, *torch.autograd.grad(y, (leaf, *lora.parameters()), dy)]

    usual = results()
    with unusual:
        others = results()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(usual, others, strict=True))


@pytest.mark.parametrize("out", [None, "out", "flags"])
def test_slots(unusual, call, out):
    x, ids, _, base = call
    usual = experts.slots(x, ids, base)
    places = {"out": torch.full((T, K, H), 7.0)} if out == "out" else {}
    places |= {"flags": torch.full((T, K), 7, dtype=torch.uint8)} if out == "flags" else {}
    with unusual:
        rows = experts.slots(x, ids, base, **places)
    assert rows.dtype == torch.float32 and rows.is_cpu and torch.equal(rows, usual)
    assert "flags" not in places or not places["flags"].any()


def test_products_in_8_bits(unusual, call):
    x, ids, weights, base = call
    usual = experts.moe(x, ids, weights, base, compute="int8")
    with unusual:
        assert torch.equal(experts.moe(x, ids, weights, base, compute="int8"), usual)


def test_packing_and_files(unusual, call, tmp_path):
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    usual = experts.pack(gate_up, down, format="int4").unpack()
    with unusual:
        base = experts.pack(gate_up, down, format="int4")
        base.save(tmp_path / "base.safetensors")
        loaded = experts.PackedExperts.load(tmp_path / "base.safetensors", partitions=2)
    for weights in (base.unpack(), loaded.unpack()):
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(weights, usual, strict=True))


def test_rows_for_a_result_with_the_negative_bit_are_copied(call):
    x, ids, _, base = call
    usual, out = experts.slots(x, ids, base), torch._neg_view(torch.zeros(T, K, H))
    assert experts.slots(x, ids, base, out=out) is out and torch.equal(out, usual)


def test_a_tensor_that_kernels_cannot_use_is_refused_before_its_address_is_passed():
    args = _native_abi.MoeArgs()
    for tensor in (torch.empty(3, device="meta"), torch.empty(3, dtype=torch.float64)):
        with pytest.raises(
            RuntimeError, match=r"the kernels do not support a torch\.float(32|64) tensor on (meta|cpu)"
        ):
            native.put(tensor, args, 0)


def test_the_library_refuses_results_with_another_element_size(call, monkeypatch):
    x, ids, _, base = call
    narrow, true = {torch.float32: torch.bfloat16}, torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, dtype, **kind: true(*size, dtype=narrow.get(dtype, dtype), **kind)
    )
    with pytest.raises(RuntimeError, match="rows has dtype 2, expected 1"):
        experts.slots(x, ids, base, backend="native")
