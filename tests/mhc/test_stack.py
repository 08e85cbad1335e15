"""HyperStack, and the memory that a connection keeps for its backward."""

import pytest
import torch
from torch import nn

from goldsmith import mhc
from mhc.networks import DIM, connection, gradients, precisions, target_against_formulas
from mhc.wrong import check, equal

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def stack(count=3, **options):
    torch.manual_seed(0)
    return mhc.HyperStack([connection(**options) for _ in range(count)])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_stack_and_all_its_gradients_agree_with_the_formulas(backend):
    tokens, iterations = ((2, 3), 20) if backend == "reference" else ((1,), 2)
    module = stack(2, backend=backend, iterations=iterations)
    prefixes = ["connections_0_", "connections_1_"]
    for precision in precisions(backend):
        check(
            target_against_formulas(module, prefixes, tokens=tokens, iterations=iterations, **precision), device=DEVICE
        )


def test_gradients_of_a_deep_stack_in_float64_agree_with_central_differences():
    """The assay's self-check differentiates the formulas numerically, in two random directions."""
    module = stack(4, iterations=5).double()
    prefixes = [f"connections_{i}_" for i in range(4)]
    check(target_against_formulas(module, prefixes, tokens=(2,), iterations=5, dtypes=(torch.float64,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"orientation": "out_in"},
        {"gamma": True, "iterations": 3},
        {"coefficient_dtype": torch.bfloat16},
        {"recompute": True},
    ],
    ids=str,
)
def test_a_stack_equals_its_connections_applied_one_by_one(options, dtype):
    module = stack(**options).to(dtype)
    x = torch.randn(2, 4, DIM).to(dtype)
    one_by_one = x
    for c in module.connections:
        one_by_one = c(one_by_one)
    assert equal(module(x), one_by_one)


def test_connections_with_different_options_keep_their_own():
    torch.manual_seed(0)
    options = [{}, {"recompute": True}, {"orientation": "out_in", "gamma": True}, {"iterations": 2, "pre_eps": 0.1}]
    module = mhc.HyperStack([connection(**o) for o in options])
    x = torch.randn(3, 4, DIM)
    assert equal(module(x), nn.Sequential(*module.connections)(x))
    stacked, apart = (gradients(m, x, list(module.parameters())) for m in (module, nn.Sequential(*module.connections)))
    for a, b in zip(stacked, apart, strict=True):  # in float32 boundary rounds as the separate operators do
        assert equal(a, b)


HOOKS = {
    "forward_pre": lambda m, hook: m.register_forward_pre_hook(lambda m, args: hook()),
    "forward": lambda m, hook: m.register_forward_hook(lambda m, args, y: hook()),
    "backward_pre": lambda m, hook: m.register_full_backward_pre_hook(lambda m, g: hook()),
    "backward": lambda m, hook: m.register_full_backward_hook(lambda m, g, h: hook()),
    "of_all_modules": lambda m, hook: nn.modules.module.register_module_forward_hook(
        lambda which, args, y: hook() if which is m else None
    ),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=list(HOOKS))
@pytest.mark.parametrize("where", [0, 1, 2])
def test_hooks_of_a_connection_run_once_and_change_nothing_else(register, where):
    module, calls = stack(), []
    x = torch.randn(2, 4, DIM)
    plain = gradients(module, x, list(module.parameters()))
    handle = register(module.connections[where], lambda: calls.append(1))
    try:
        assert all(equal(a, b) for a, b in zip(plain, gradients(module, x, list(module.parameters())), strict=True))
    finally:
        handle.remove()
    assert calls == [1]


def test_the_return_value_of_a_hook_is_used():
    module = stack()
    module.connections[1].register_forward_hook(lambda module, args, y: 2 * y)
    x = torch.randn(2, 4, DIM)
    assert equal(module(x), nn.Sequential(*module.connections)(x))


def test_an_overridden_forward_is_called():
    class Doubled(mhc.HyperConnection):
        def forward(self, x, *args, **kwargs):
            return super().forward(2 * x, *args, **kwargs)

    torch.manual_seed(0)
    connections = [connection(), Doubled(DIM, torch.tanh, backend="reference"), connection()]
    x = torch.randn(2, 4, DIM)
    assert equal(mhc.HyperStack(connections)(x), nn.Sequential(*connections)(x))
    first = connections[0]
    first.forward = lambda x: mhc.HyperConnection.forward(first, -x)
    assert equal(mhc.HyperStack(connections)(x), nn.Sequential(*connections)(x))


def test_boundary_is_used_except_around_connections_that_must_be_called():
    module = stack(5)
    x = torch.randn(2, 4, DIM)

    def boundaries():
        with torch.profiler.profile() as profile:
            module(x)
        return sum(event.name == "goldsmith::mhc_boundary" for event in profile.events())

    assert boundaries() == 4
    module.connections[1].register_forward_hook(lambda module, args, y: None)
    assert boundaries() == 2


def test_extra_results_of_the_layers_are_returned_in_a_list():
    layers = (lambda h, k: (h * k, k + 1)), (lambda h, k: (h * k, k + 2, "more"))
    module = mhc.HyperStack([mhc.HyperConnection(DIM, layer, backend="reference") for layer in layers])
    x = torch.randn(2, 4, DIM)
    y, rests = module(x, 2)
    assert y.shape == x.shape and rests == [(3,), (4, "more")]


def test_a_stack_of_one_equals_its_connection():
    module = stack(1)
    x = torch.randn(2, 4, DIM)
    for a, b in zip(
        *(gradients(m, x, list(module.parameters())) for m in (module, module.connections[0])), strict=True
    ):
        assert equal(a, b)


def test_a_stack_compiles_as_one_graph():
    torch._dynamo.reset()
    module = stack()
    head = mhc.HyperHead(DIM, backend="reference")

    def model(x):
        return head(module(mhc.expand(x, 4, backend="reference")))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, parameters = torch.randn(3, DIM), [*module.parameters(), *head.parameters()]
    for eager, traced in zip(gradients(model, x, parameters), gradients(compiled, x, parameters), strict=True):
        assert equal(eager, traced)


# -- memory -----------------------------------------------------------------------------------------------------------


def kept_bytes(run, excluded):
    """Bytes of storage that autograd keeps during `run`, without the storages that the caller holds anyway."""
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        notes.append(tensor)
        return tensor

    notes = []  # keeps the storage alive, so that no address is reused
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = run()
    known = {t.untyped_storage().data_ptr() for t in (*excluded, *results)}
    return sum(size for address, size in kept.items() if address not in known)


@pytest.mark.parametrize("iterations", [2, 20])
def test_pre_and_post_keep_at_most_320_bytes_per_token_for_any_iterations(iterations):
    tokens = 1024
    module = mhc.HyperConnection(DIM, nn.Identity())
    x, f = torch.randn(tokens, 4, DIM, requires_grad=True), torch.randn(tokens, DIM, requires_grad=True)

    def run():
        h_in, h_post, h_res = mhc.pre(x, *module.mixing[:3], iterations=iterations, backend="reference")
        kept_by_user.extend((h_in, h_post, h_res))
        return h_in, mhc.post(x, f, h_post, h_res, backend="reference")

    kept_by_user = []
    assert kept_bytes(run, [x, f, *module.parameters()]) <= 320 * tokens
    size = kept_bytes(run, [x, f, *module.parameters()])
    assert 100 * tokens <= size, "inv_rms and h_mix at least: otherwise the hooks saw nothing"


def test_a_connection_keeps_no_more_than_its_operators_and_nothing_with_recompute():
    tokens, sizes = 1024, {}
    for recompute in (False, True):
        module = mhc.HyperConnection(DIM, lambda h: (2 * h, h), recompute=recompute, backend="reference")
        x, excluded = torch.randn(tokens, 4, DIM, requires_grad=True), []

        def run(module=module, x=x, excluded=excluded):
            x_next, h = module(x)
            excluded.append(h)
            return x_next, h

        sizes[recompute] = kept_bytes(run, [x, *module.parameters()])
    # besides the records, post's backward needs the layer's output f: 4 * DIM bytes per token
    assert 100 * tokens <= sizes[False] - 4 * DIM * tokens <= 320 * tokens, sizes
    assert sizes[True] - 4 * DIM * tokens <= 1024, sizes
