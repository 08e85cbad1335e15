// h = act(g, u) and its derivatives, sixteen features at a time.
#pragma once

#include "../../goldsmith.h"
#include "simd.h"

namespace gs::GS_LEVEL {

// e^x within 2 units in the last place; 0 below -87.3, infinite above 88.7. NaN stays NaN.
inline Floats exponential(Floats x) {
    const Floats low = all(-87.33f), high = all(88.72f);
    const Floats inside = greater(low, lesser(high, x));
    const Floats n = round(inside * all(1.44269504f));
    const Floats r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), inside));
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1));
    // 2^n as two factors, because 2^128 overflows float32
    const Words whole = to_words(n), half = right_signed<1>(whole);
    const Words rest = to_words(n - to_floats(half));
    const Floats result = p * as_floats(left<23>(half + all_words(127))) * as_floats(left<23>(rest + all_words(127)));
    const Floats capped = where_greater(x, high, all(std::numeric_limits<float>::infinity()), result);
    return where_greater(low, x, zero(), capped);
}

// The sigmoids of x and -x. The latter is 1 - sigmoid(x) for x <= 0 and e^-x sigmoid(x) for x > 0, to avoid
// cancellation.
struct Sigmoids {
    Floats of, against;
    explicit Sigmoids(Floats x) {
        const Floats e = exponential(zero() - x);
        of = all(1) / (all(1) + e);
        against = where_greater(x, zero(), e * of, all(1) - of);
    }
};

struct Activation {
    gs_activation kind;
    float alpha, limit;

    // clamped g and u; NaN stays NaN
    Floats clamp_gate(Floats g) const { return lesser(all(limit), g); }
    Floats clamp_up(Floats u) const { return greater(all(-limit), lesser(all(limit), u)); }

    struct Gradients {
        Floats h, dg, du;
    };

    // h, dh * dh/dg and dh * dh/du. Beyond a limit the gradient is 0 for any dh, even NaN; at equality it passes (like
    // torch.clamp), and for a NaN argument it is 0. The gate of relu2 is a limit in this sense.
    Gradients gradients(Floats gate, Floats up, Floats dh) const {
        Gradients result = inside(clamp_gate(gate), clamp_up(up));
        result.dg = dh * result.dg, result.du = dh * result.du;
        if (kind == GS_RELU2)
            result.dg = where_greater(all(std::numeric_limits<float>::denorm_min()), gate, zero(), result.dg);
        if (std::isinf(limit)) return result;
        const Floats above = all(std::nextafterf(limit, HUGE_VALF)), below = zero() - above;
        result.dg = where_greater(above, gate, result.dg, zero());
        result.du = where_greater(above, up, where_greater(up, below, result.du, zero()), zero());
        return result;
    }

    Floats value(Floats gate, Floats up) const { return inside(clamp_gate(gate), clamp_up(up)).h; }

private:
    // h and its derivatives
    Gradients inside(Floats g, Floats u) const {
        switch (kind) {
            case GS_SILU: {
                const Sigmoids s(g);
                const Floats silu = g * s.of;
                return {silu * u, u * s.of * fma(g, s.against, all(1)), silu};
            }
            case GS_GELU: return gelu(g, u);
            case GS_GELU_TANH: {  // (1 + tanh z) / 2 = sigmoid(2 z), without cancellation at either end
                const float c = 0.7978845608028654f, d = 0.044715f;
                const Floats square = g * g, z = all(2 * c) * g * fma(all(d), square, all(1));
                const Sigmoids s(z);
                const Floats slope = all(2 * c) * fma(all(3 * d), square, all(1));
                return {g * s.of * u, u * fma(g * s.of * s.against, slope, s.of), g * s.of};
            }
            case GS_RELU2: {
                const Floats r = greater(zero(), g);
                return {r * r * u, all(2) * r * u, r * r};
            }
            default: {  // GS_SWIGLU_OAI
                const Sigmoids s(all(alpha) * g);
                const Floats v = u + all(1), slope = all(alpha) * g * s.against;
                return {g * s.of * v, v * fma(s.of, slope, s.of), g * s.of};
            }
        }
    }

    Gradients gelu(Floats g, Floats u) const {
        alignas(64) float x[LANES], normal[LANES], density[LANES];
        store(x, g);
        for (int i = 0; i < LANES; ++i) {
            normal[i] = 0.5f * erfcf(-0.7071067811865476f * x[i]);
            density[i] = 0.3989422804014327f * expf(-0.5f * x[i] * x[i]);
        }
        const Floats phi = load(normal);
        return {g * phi * u, u * fma(g, load(density), phi), g * phi};
    }
};

}  // namespace gs::GS_LEVEL
