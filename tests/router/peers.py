"""Other projects' layers in a few lines: their state dicts, and the functions that they compute."""

import torch
from torch.nn import functional


def omnimoe_state(dim=12, rows=25, wide=16):
    s = int(rows**0.5)
    state = {"up_embed.weight": torch.randn(rows, dim), "down_embed.weight": torch.randn(rows, dim)}
    for axis in "xy":
        state[f"router_gate_{axis}.weight"] = torch.randn(s, dim)
        state[f"router_norm_{axis}.running_mean"] = torch.randn(s)
        state[f"router_norm_{axis}.running_var"] = torch.rand(s) + 0.5
        state[f"router_norm_{axis}.num_batches_tracked"] = torch.tensor(7)
    state |= {f"{name}_proj.weight": torch.randn(wide, dim) for name in ("gate", "up")}
    return state | {"down_proj.weight": torch.randn(dim, wide)}


def omnimoe(state, h, k):
    """OmniMoE in evaluation: log-softmax of normalised logits, exp of the k largest sums."""
    logs = []
    for axis in "xy":
        logits = h @ state[f"router_gate_{axis}.weight"].T - state[f"router_norm_{axis}.running_mean"]
        logs.append((logits / (state[f"router_norm_{axis}.running_var"] + 1e-5).sqrt()).log_softmax(-1))
    scores, at = (logs[0][..., :, None] + logs[1][..., None, :]).flatten(-2).topk(k, -1)
    hidden = functional.silu(torch.einsum("td,tkd->tk", h, state["up_embed.weight"][at]))
    routed = torch.einsum("tk,tkd->td", scores.exp() * hidden, state["down_embed.weight"][at])
    gate, up = (h @ state[f"{name}_proj.weight"].T for name in ("gate", "up"))
    return routed + (functional.silu(gate) * up) @ state["down_proj.weight"].T


def peer_state(dim=12, s=5, heads=3, key_dim=4, separate=False, rms=True):
    rows = s * s * (heads if separate else 1)
    state = {f"weight_{name}_embed.weight": torch.randn(rows, dim) for name in ("down", "up")}
    state |= {"to_queries.0.weight": torch.randn(2 * heads * key_dim, dim), "keys": torch.randn(heads, s, 2, key_dim)}
    return state | ({"norm.gamma": torch.randn(dim)} if rms else {})


def peer(state, h, k, compete):
    if "norm.gamma" in state:
        h = functional.normalize(h, dim=-1) * h.shape[-1] ** 0.5 * (state["norm.gamma"] + 1)
    scores, at = _product_keys(h @ state["to_queries.0.weight"].T, state["keys"], k if compete else 1)
    heads, s = state["keys"].shape[:2]
    if heads * s * s == len(state["weight_up_embed.weight"]):
        at = at + torch.arange(heads)[:, None] * s * s
    hidden = functional.gelu(torch.einsum("td,thkd->thk", h, state["weight_down_embed.weight"][at]))
    weights = scores.softmax(-1) if compete else scores.relu()
    return torch.einsum("thk,thkd->td", hidden * weights, state["weight_up_embed.weight"][at])


def memory_state(dim=12, s=5, heads=3, key_dim=4, pre=False, out=False, batch=False):
    state = {"to_queries.weight": torch.randn(2 * heads * key_dim, dim), "keys": torch.randn(heads, s, 2, key_dim)}
    state["values.weight"] = torch.randn(s * s, dim)
    norms = [("norm.fn" if batch else "norm", key_dim)]
    norms += [("pre_layernorm", dim)] * pre + [("output_norm", dim)] * out
    for name, size in norms:
        state |= {f"{name}.weight": torch.randn(size), f"{name}.bias": torch.randn(size)}
    if batch:
        state |= {"norm.fn.running_mean": torch.randn(key_dim), "norm.fn.running_var": torch.rand(key_dim) + 0.5}
        state["norm.fn.num_batches_tracked"] = torch.tensor(3)
    return state


def memory(state, h, k, compete):
    def normed(name, t):
        return functional.layer_norm(t, t.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    if "pre_layernorm.weight" in state:
        h = normed("pre_layernorm", h)
    heads, _, _, key_dim = state["keys"].shape
    queries = (h @ state["to_queries.weight"].T).view(-1, 2, heads, key_dim)
    if "norm.weight" in state:
        queries = normed("norm", queries)
    else:
        own = {name.removeprefix("norm.fn."): value for name, value in state.items() if name.startswith("norm.fn.")}
        queries = (queries - own["running_mean"]) / (own["running_var"] + 1e-5).sqrt() * own["weight"] + own["bias"]
    scores, at = _product_keys(queries.flatten(1), state["keys"], k)
    weights = scores.softmax(-1) if compete else scores.relu()
    y = torch.einsum("thk,thkd->td", weights, state["values.weight"][at])
    return normed("output_norm", y) if "output_norm.weight" in state else y


def _product_keys(queries, keys, k):
    heads, s, _, key_dim = keys.shape
    dots = torch.einsum("tphd,hnpd->pthn", queries.view(-1, 2, heads, key_dim), keys)
    return (dots[0][..., :, None] + dots[1][..., None, :]).flatten(-2).topk(k, -1)
