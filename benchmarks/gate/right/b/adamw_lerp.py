"""Right: both moments by interpolation, and one division by the corrected root, with numbers of Python for the rest."""

import torch

PROBLEM = "a_adamw"
STATUS = "accepted"


def candidate(p, g, m, v, lr, eps, decay, step):
    m_new, v_new = torch.lerp(m, g, 0.1), torch.addcmul(0.99 * v, g, g, value=0.01)
    root = (v_new / (1 - 0.99**step)).sqrt_().add_(eps)
    return torch.addcdiv(p * (1 - lr * decay), m_new, root, value=-lr / (1 - 0.9**step)), m_new, v_new
