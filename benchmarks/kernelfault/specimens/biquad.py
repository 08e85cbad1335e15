"""A cascade of second-order recursive filters behind a gain, as transposed direct form II, with states in and out.

y = b0 x + s1, s1' = b1 x - a1 y + s2, s2' = b2 x - a2 y, section after section; a row of sos is b0 b1 b2 a1 a2. Samples
go in blocks, the state is carried. The backward goes from the last sample on, from the gradient of the last state.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4
GAINS: dict[float, float] = {}


@assay.case(C=[2], T=[11], S=[2])
def stereo(make, C, T, S):
    feedback = torch.stack([make.uniform(S) - 0.5, make.uniform(S) * 0.4 + 0.1], 1)
    return {
        "x": make.normal(C, T), "sos": torch.cat([make.normal(S, 3), feedback], 1), "state": make.normal(C, S, 2),
        "gain_db": 3.0,
    }  # fmt: skip


@assay.case(C=[3], T=[6], S=[3])
def sections(make, C, T, S):
    return stereo[0].draw(make, C, T, S)


@assay.case(C=[1], T=[17], S=[2])
def mono(make, C, T, S):
    return {**stereo[0].draw(make, C, T, S), "gain_db": -6.0}


def golden(x, sos, state, gain_db):
    signal, ends = x * 10 ** (gain_db / 20), []
    for s in range(len(sos)):
        b0, b1, b2, a1, a2 = sos[s]
        s1, s2 = state[:, s].unbind(1)
        out = []
        for t in range(x.shape[1]):
            out.append(b0 * signal[:, t] + s1)
            s1, s2 = b1 * signal[:, t] - a1 * out[t] + s2, b2 * signal[:, t] - a2 * out[t]
        signal = assay.stage(f"section{s}", torch.stack(out, 1))
        ends.append(torch.stack([s1, s2], 1))
    return signal, torch.stack(ends, 1)


def factor_of(gain_db):
    if gain_db not in GAINS:
        GAINS[gain_db] = 10 ** (gain_db / 20)
    return GAINS[gain_db]


def run_block(x, y, coefs, state, start, stop):
    """Samples start to stop of one section; the state, [C, 2], is carried in place."""
    b0, b1, b2, a1, a2 = coefs
    for t in range(start, stop):
        y[:, t] = b0 * x[:, t] + state[:, 0]
        state[:, 0] = b1 * x[:, t] - a1 * y[:, t] + state[:, 1]
        state[:, 1] = b2 * x[:, t] - a2 * y[:, t]


class Biquad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sos, state, gain_db):
        (C, T), S = x.shape, len(sos)
        state = state.clone()
        signals = [x * factor_of(gain_db)]
        for s in range(S):
            y = torch.empty(C, T)
            for start in range(0, T, BLOCK):
                run_block(signals[s], y, sos[s], state[:, s], start, min(start + BLOCK, T))
            signals.append(assay.stage(f"section{s}", y))
        ctx.save_for_backward(sos, *signals)
        ctx.gain_db = gain_db
        return signals[S].clone(), state

    @staticmethod
    def backward(ctx, g, g_state):
        sos, *signals = ctx.saved_tensors
        (C, T), S = g.shape, len(sos)
        d_sos, d_state = torch.zeros(sos.shape), torch.empty(C, S, 2)
        for s in reversed(range(S)):
            b0, b1, b2, a1, a2 = sos[s]
            x, y = signals[s], signals[s + 1]
            g1, g2 = g_state[:, s, 0], g_state[:, s, 1]
            dx = torch.empty(C, T)
            for t in reversed(range(T)):
                dy = g[:, t] - a1 * g1 - a2 * g2
                dx[:, t] = b0 * dy + b1 * g1 + b2 * g2
                into_x = torch.stack([dy, g1, g2]) @ x[:, t]
                into_y = torch.stack([g1, g2]) @ y[:, t]
                d_sos[s] += torch.cat([into_x, -into_y])
                g1, g2 = dy, g1
            d_state[:, s, 0], d_state[:, s, 1] = g1, g2
            g = dx
        return g * factor_of(ctx.gain_db), d_sos, d_state, None


def kernel(x, sos, state, gain_db):
    return Biquad.apply(x, sos, state, gain_db)


def target():
    return assay.Target(
        kernel, golden, cases=[stereo, sections, mono], name="biquad", outputs=("y", "state_new")
    )  # fmt: skip
