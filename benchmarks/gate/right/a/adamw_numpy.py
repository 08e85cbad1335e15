"""Right: numpy on views of the tensors' memory; the results own new memory."""

import numpy as np
import torch

PROBLEM = "a_adamw"
STATUS = "accepted"


def candidate(p, g, m, v, lr, eps, decay, step):
    p, g, m, v = (t.numpy() for t in (p, g, m, v))
    f = np.float32
    with np.errstate(all="ignore"):
        m_new = f(0.9) * m + f(0.1) * g
        v_new = f(0.99) * v + f(0.01) * g * g
        root = np.sqrt(v_new / f(1 - 0.99**step)) + f(eps)
        p_new = p * f(1 - lr * decay) - f(lr / (1 - 0.9**step)) * m_new / root
    return tuple(torch.from_numpy(result) for result in (p_new, m_new, v_new))
