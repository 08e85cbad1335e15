"""Right: temporaries live in a workspace that every call reuses; the results are fresh."""

import torch

PROBLEM = "a_adamw"
STATUS = "accepted"


_WORKSPACE = {}


def candidate(p, g, m, v, lr, eps, decay, step):
    size = p.numel()
    if size not in _WORKSPACE:
        _WORKSPACE[size] = (torch.zeros(size), torch.zeros(size))
    root, ratio = _WORKSPACE[size]
    m_new = torch.lerp(m, g, 0.1)
    v_new = torch.addcmul(v * 0.99, g, g, value=0.01)
    torch.div(v_new, 1 - 0.99**step, out=root)
    root.sqrt_().add_(eps)
    torch.div(m_new, root, out=ratio)
    return torch.add(p * (1 - lr * decay), ratio, alpha=-lr / (1 - 0.9**step)), m_new, v_new
