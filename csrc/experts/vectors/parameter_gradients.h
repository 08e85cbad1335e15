// Gradients of parameters: out[m, n] = scale * sum over an expert's routes of left[route, m] right[route, n].
//
// One item computes each element and adds the routes in order; an expert without routes gets zeros.
#pragma once

#include "call.h"

namespace gs::GS_LEVEL {

// Rows by token (routed: looked up through the grouping) or in the order of the groups; weighed: times the route's
// weight.
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
        const Side left{{reinterpret_cast<const char*>(thin), ranks, ranks, 1, false}, false, weighed};
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
            const Scratch scratch = call_.scratch(worker);
            alignas(64) float total[STRIPE] = {};
            for (int64_t k = begin(expert); k < begin(expert + 1); ++k) {
                read_row(rows, k, col, width, nullptr, scratch.stripes);
                for (int64_t j = 0; j < width; ++j) total[j] += scratch.stripes[j];
            }
            const Factor to{static_cast<char*>(out.data), out.strides[0], out.strides[1], out.dtype == GS_BF16};
            for (int64_t j = 0; j < width; ++j) to.put(expert, offset + col + j, total[j]);
        });
    }

private:
    static constexpr int64_t HEIGHT = STRIPES * STRIPE;  // rows of a block of the result
    static_assert(HEIGHT <= ROWS);

    const Call& call_;

    static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
    int64_t begin(int64_t expert) const { return call_.grouping.expert[expert]; }

    void products(const gs_tensor& out, bool turned, int64_t offset, const Side& left, const Side& right,
                  const Dropout* mask, float scale) {
        constexpr int64_t panel = STRIPES * STRIPE;
        const int64_t m = left.rows.columns, n = right.rows.columns;
        const int64_t blocks = (m + HEIGHT - 1) / HEIGHT, panels = (n + panel - 1) / panel;
        parallel_for(call_.args.experts * blocks * panels, [&](int64_t item, int worker) {
            const int64_t expert = item / (blocks * panels), row = item / panels % blocks * HEIGHT,
                          col = item % panels * panel;
            const Factor straight = factor_of(out, expert), to = turned ? transposed(straight) : straight;
            if (begin(expert) == begin(expert + 1)) {
                if (row == 0 && col == 0) clear(straight, turned ? 0 : offset, turned ? n : m, turned ? m : n);
                return;
            }
            const int64_t height = least(m - row, HEIGHT), width = least(n - col, panel);
            const int64_t stripes = (width + STRIPE - 1) / STRIPE;
            const Scratch scratch = call_.scratch(worker);
            for (int64_t c = 0; c < stripes; ++c) Call::clear(scratch.sums + c * ROWS * STRIPE, height);
            for (int64_t k = begin(expert); k < begin(expert + 1); k += DEPTH) {
                const int64_t end = least(k + DEPTH, begin(expert + 1));
                lay(left, right, k, end, row, height, col, width, mask, scratch);
                for (int64_t c = 0; c < stripes; ++c)
                    multiply(scratch.left, height, scratch.stripes + c * DEPTH * STRIPE, end - k,
                             scratch.sums + c * ROWS * STRIPE);
            }
            give(scratch.sums, to, offset + row, height, col, width, scale);
        });
    }

    // to[row + i, col + j] = scale * sums[i, j], written in memory order
    static void give(const float* sums, const Factor& to, int64_t row, int64_t height, int64_t col, int64_t width,
                     float scale) {
        alignas(64) float line[HEIGHT];
        const auto sum = [&](int64_t i, int64_t j) { return sums + (j / STRIPE * ROWS + i) * STRIPE + j % STRIPE; };
        if (to.column == 1) {
            for (int64_t i = 0; i < height; ++i) {
                for (int64_t j = 0; j < width; j += LANES) store(line + j, all(scale) * load(sum(i, j)));
                write(to.place(row + i, col), to.bf16, width, line);
            }
        } else if (to.row == 1) {
            for (int64_t j = 0; j < width; ++j) {
                for (int64_t i = 0; i < height; ++i) line[i] = scale * *sum(i, j);
                write(to.place(row, col + j), to.bf16, height, line);
            }
        } else {
            for (int64_t i = 0; i < height; ++i)
                for (int64_t j = 0; j < width; ++j) to.put(row + i, col + j, scale * *sum(i, j));
        }
    }

    // Zeroes the gradient of an expert without routes; with few tokens these are most gradients.
    static void clear(const Factor& to, int64_t row, int64_t rows, int64_t columns) {
        const size_t element = to.bf16 ? 2 : 4;
        char* const at = to.data + static_cast<size_t>(row * to.row) * element;
        if (to.column == 1 && to.row == columns) {
            std::memset(at, 0, static_cast<size_t>(rows * columns) * element);
            return;
        }
        for (int64_t i = row; i < row + rows; ++i)
            for (int64_t j = 0; j < columns; ++j) to.put(i, j, 0);
    }

    // Prepares routes [begin, end): a part of the left rows transposed, the right rows split into stripes.
    void lay(const Side& left, const Side& right, int64_t begin, int64_t end, int64_t row, int64_t height, int64_t col,
             int64_t width, const Dropout* mask, const Scratch& scratch) const {
        alignas(64) float values[STRIPES * STRIPE] = {};
        for (int64_t i = 0; i < end - begin; ++i) {
            read_row(left, begin + i, row, height, nullptr, values);
            for (int64_t j = 0; j < height; ++j) scratch.left[j * LEFT_STRIDE + i] = values[j];
        }
        std::memset(values, 0, sizeof values);  // stripes are 0 beyond `width`
        for (int64_t i = 0; i < end - begin; ++i) {
            read_row(right, begin + i, col, width, mask, values);
            for (int64_t c = 0; c * STRIPE < width; ++c)
                std::memcpy(scratch.stripes + (c * DEPTH + i) * STRIPE, values + c * STRIPE, STRIPE * 4);
        }
    }

    void read_row(const Side& side, int64_t place, int64_t col, int64_t width, const Dropout* mask, float* to) const {
        const int64_t route = call_.grouping.order[place];
        read(side.rows.at(side.routed ? route : place, col), side.rows.bf16, width, to);
        if (side.weighed) {
            const float w = weight_at(call_.args, route);
            for (int64_t j = 0; j < width; ++j) to[j] *= w;
        }
        if (mask && mask->on) drop(*mask, route / call_.slots, route % call_.slots, col, col + width, to);
    }
};

}  // namespace gs::GS_LEVEL
