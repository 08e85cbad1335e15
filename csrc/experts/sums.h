// Gradients that are sums over the routes of an expert: out[m, n] = scale * sum over routes of left[route, m]
// right[route, n].
//
// Every element has one item, which adds the routes in order; an expert without routes gets zeros.
#pragma once

#include "call.h"

namespace gs::GS_LEVEL {

// Rows by token (`routed`: found through the plan) or by place in the plan; `weighed`: times the route's weight.
struct Side {
    Rows rows;
    bool routed, weighed = false;
};

class Sums {
public:
    explicit Sums(const Call& call) : call_(call) {}

    // The gradient of A [E, r, n] or, transposed, of B [E, n, r]. thin: [places, r].
    void lora(const gs_tensor& out, bool transposed, const float* thin, bool weighed, const Side& right,
              const Dropout* mask, double scale) {
        if (out.dtype == GS_NONE) return;
        const int64_t ranks = out.sizes[transposed ? 2 : 1];
        const Side left{{reinterpret_cast<const char*>(thin), ranks, 1, false}, false, weighed};
        products(out, transposed, 0, left, right, mask, static_cast<float>(scale));
    }

    // The gradient of rows [offset, offset + left's columns) of weights [E, .., n].
    void weights(const gs_tensor& out, int64_t offset, const Side& left, const Side& right) {
        if (out.dtype != GS_NONE) products(out, false, offset, left, right, nullptr, 1);
    }

    // The gradient of columns [offset, offset + n) of a bias [E, ..].
    void bias(const gs_tensor& out, int64_t offset, const Side& rows) {
        if (out.dtype == GS_NONE) return;
        const int64_t panels = (rows.rows.columns + STRIPE - 1) / STRIPE;
        parallel_for(call_.args.experts * panels, [&](int64_t item, int worker) {
            const int64_t expert = item / panels, col = item % panels * STRIPE,
                          width = least(rows.rows.columns - col, STRIPE);
            const Desk desk = call_.desk(worker);
            alignas(64) float total[STRIPE] = {};
            for (int64_t k = begin(expert); k < begin(expert + 1); ++k) {
                read_row(rows, k, col, width, nullptr, desk.stripes);
                for (int64_t j = 0; j < width; ++j) total[j] += desk.stripes[j];
            }
            const Factor to{static_cast<char*>(out.data), out.strides[0], out.strides[1], out.dtype == GS_BF16};
            for (int64_t j = 0; j < width; ++j) to.put(expert, offset + col + j, total[j]);
        });
    }

private:
    const Call& call_;

    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    int64_t begin(int64_t expert) const { return call_.plan.expert[expert]; }

    void products(const gs_tensor& out, bool turned, int64_t offset, const Side& left, const Side& right,
                  const Dropout* mask, float scale) {
        const int64_t m = left.rows.columns, n = right.rows.columns;
        const int64_t blocks = (m + ROWS - 1) / ROWS, panels = (n + STRIPE - 1) / STRIPE;
        parallel_for(call_.args.experts * blocks * panels, [&](int64_t item, int worker) {
            const int64_t expert = item / (blocks * panels), row = item / panels % blocks * ROWS,
                          col = item % panels * STRIPE;
            const int64_t height = least(m - row, ROWS), width = least(n - col, STRIPE);
            const Desk desk = call_.desk(worker);
            Call::clear(desk.sums, height);
            for (int64_t k = begin(expert); k < begin(expert + 1); k += DEPTH) {
                const int64_t end = least(k + DEPTH, begin(expert + 1));
                for (int64_t i = k; i < end; ++i) {
                    read_row(left, i, row, height, nullptr, desk.more);
                    for (int64_t j = 0; j < height; ++j) desk.left[j * LEFT_STRIDE + i - k] = desk.more[j];
                    float* stripe = desk.stripes + (i - k) * STRIPE;
                    read_row(right, i, col, width, mask, stripe);
                    for (int64_t j = width; j < STRIPE; ++j) stripe[j] = 0;
                }
                multiply(desk.left, height, desk.stripes, end - k, desk.sums);
            }
            const Factor straight = factor_of(out, expert), to = turned ? transposed(straight) : straight;
            for (int64_t i = 0; i < height; ++i)
                for (int64_t j = 0; j < width; ++j)
                    to.put(offset + row + i, col + j, scale * desk.sums[i * STRIPE + j]);
        });
    }

    void read_row(const Side& side, int64_t place, int64_t col, int64_t width, const Dropout* mask, float* to) const {
        const int64_t route = call_.plan.order[place];
        read(side.rows.at(side.routed ? route : place, col), side.rows.bf16, width, to);
        if (side.weighed) {
            const float w = weight_at(call_.args, route);
            for (int64_t j = 0; j < width; ++j) to[j] *= w;
        }
        if (mask && mask->on) drop(*mask, route / call_.slots, route % call_.slots, col, col + width, to);
    }
};

}  // namespace gs::GS_LEVEL
