"""h_t = C_t q_t / max(|n_t q_t|, 1), C_t = f_t C_{t-1} + i_t v_t k_t^T, n_t = f_t n_{t-1} + i_t k_t: xLSTM's mLSTM.

f is the sigmoid of its gate, i the exponential of its own, keys are divided by sqrt(D). C and n are held divided by
exp(m), m_t = max(log f_t + m_{t-1}, i's gate), m_0 = 0, and the backward goes from the last step to the first with
these states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from goldsmith import assay


@assay.case(H=[2], T=[7], D=[4])
def heads(make, H, T, D):
    return {
        "q": make.normal(H, T, D), "k": make.normal(H, T, D), "v": make.normal(H, T, D),
        "i_gate": make.normal(H, T), "f_gate": 1 + make.normal(H, T),
    }  # fmt: skip


@assay.case(H=[3], T=[4], D=[5])
def few(make, H, T, D):
    return heads[0].draw(make, H, T, D)


def golden(q, k, v, i_gate, f_gate):
    H, T, D = q.shape
    C, n, m = q.new_zeros(H, D, D), q.new_zeros(H, D), q.new_zeros(H)
    h = []
    for t in range(T):
        slow = F.logsigmoid(f_gate[:, t]) + m
        m = torch.maximum(slow, i_gate[:, t])
        f, i = torch.exp(slow - m), torch.exp(i_gate[:, t] - m)
        key = k[:, t] / D**0.5
        C = f[:, None, None] * C + i[:, None, None] * v[:, t].unsqueeze(2) * key.unsqueeze(1)
        n = f[:, None] * n + i[:, None] * key
        total = (n * q[:, t]).sum(1).abs()
        h.append((C * q[:, t].unsqueeze(1)).sum(2) / torch.maximum(total, torch.exp(-m)).unsqueeze(1))
    return torch.stack(h, 1)


class MLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, i_gate, f_gate):
        H, T, D = q.shape
        h = torch.empty(H, T, D)
        Cs, ns, ms = torch.zeros(H, T + 1, D, D), torch.zeros(H, T + 1, D), torch.zeros(H, T + 1)
        for head in range(H):
            C, n, m = torch.zeros(D, D), torch.zeros(D), torch.zeros(())
            for t in range(T):
                slow = F.logsigmoid(f_gate[head, t]) + m
                m = torch.maximum(slow, i_gate[head, t])
                f, i = torch.exp(slow - m), torch.exp(i_gate[head, t] - m)
                key = k[head, t] * D**-0.5
                C = f * C + i * torch.outer(v[head, t], key)
                n = f * n + i * key
                norm = torch.maximum((n @ q[head, t]).abs(), torch.exp(-m))
                h[head, t] = C @ q[head, t] / norm
                Cs[head, t + 1], ns[head, t + 1], ms[head, t + 1] = C, n, m
        ctx.save_for_backward(q, k, v, i_gate, f_gate, h, Cs, ns, ms)
        return h

    @staticmethod
    def backward(ctx, g):
        q, k, v, i_gate, f_gate, h, Cs, ns, ms = ctx.saved_tensors
        H, T, D = q.shape
        dq, dk, dv = torch.empty(H, T, D), torch.empty(H, T, D), torch.empty(H, T, D)
        di, df = torch.empty(H, T), torch.empty(H, T)
        for head in range(H):
            dC, dn = torch.zeros(D, D), torch.zeros(D)
            for t in reversed(range(T)):
                C, n, m = Cs[head, t + 1], ns[head, t + 1], ms[head, t + 1]
                f = torch.exp(F.logsigmoid(f_gate[head, t]) + ms[head, t] - m)
                i = torch.exp(i_gate[head, t] - m)
                key, query = k[head, t] * D**-0.5, q[head, t]
                total, least = n @ query, torch.exp(-m)
                norm = torch.maximum(total.abs(), least)
                dout = g[head, t] / norm
                dtotal = torch.where(total.abs() > least, -(dout @ h[head, t]) * torch.sign(total), 0.0)
                dC = dC + torch.outer(dout, query)
                dn = dn + dtotal * query
                dq[head, t] = C.mT @ dout + dtotal * n
                dv[head, t] = i * (dC @ key)
                dk[head, t] = i * (dC.mT @ v[head, t] + dn) * D**-0.5
                di[head, t] = i * (v[head, t] @ dC @ key + dn @ key)
                df[head, t] = f * ((dC * Cs[head, t]).sum() + dn @ ns[head, t]) * torch.sigmoid(-f_gate[head, t])
                dC, dn = f * dC, f * dn
        return dq, dk, dv, di, df


def kernel(q, k, v, i_gate, f_gate):
    return MLSTM.apply(q, k, v, i_gate, f_gate)


def target():
    return assay.Target(kernel, golden, cases=[heads, few], name="mlstm", outputs=("h",))
