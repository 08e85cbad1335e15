// What every phase of one call knows: sizes, scratch, and the steps that phases share.
//
// A phase is a list of items that any worker may take. An item computes its outputs whole, in one order: neither the
// number of threads nor who takes what can change a bit.
#pragma once

#include "../arena.h"
#include "../pool.h"
#include "activation.h"
#include "rows.h"

namespace gs::GS_LEVEL {

inline bool given(const gs_tensor& t) { return t.dtype != GS_NONE; }

inline float weight_at(const gs_moe_args& args, int64_t route) {
    return matrix_of(args.weights).at(route / args.slots, route % args.slots);
}

// Scratch of one worker.
struct Desk {
    float *left, *stripes, *sums, *more;
};

// 32 intermediate features (or `width`) of one slice.
struct Columns {
    int64_t slice, first, width, begin;  // first: in the slice; begin: in the whole
};

constexpr int STRIPES = WIDEST / STRIPE;

struct Call {
    const gs_moe_args& args;
    const Plan& plan;
    const int64_t outer, inner, slots;  // H, I, k
    const bool bf16;
    const Rows x;
    Arena arena;

    Call(const gs_moe_args& a, const Plan& p)
        : args(a),
          plan(p),
          outer(a.hidden),
          inner(a.intermediate),
          slots(a.slots),
          bf16(a.x.dtype == GS_BF16),
          x(rows_of(a.x, a.hidden, a.slots)),
          left_(arena.each<float>(ROWS * LEFT_STRIDE)),
          stripes_(arena.each<float>(STRIPES * DEPTH * STRIPE)),
          sums_(arena.each<float>(STRIPES * ROWS * STRIPE)),
          more_(arena.each<float>(ROWS * STRIPE)) {}

    int64_t ranks(const gs_lora& lora) const { return given(lora.a) ? lora.a.sizes[1] : 0; }

    Desk desk(int worker) const {
        return {left_.data(worker), stripes_.data(worker), sums_.data(worker), more_.data(worker)};
    }

    // The intermediate features in pieces of `width`, by slice.
    int64_t pieces(int64_t width) const {
        int64_t count = 0;
        for (int64_t s = 0; s < args.slice_count; ++s)
            count += (args.slices[s].end - args.slices[s].begin + width - 1) / width;
        return count;
    }
    Columns piece(int64_t at, int64_t width) const {
        for (int64_t s = 0;; ++s) {
            const int64_t size = args.slices[s].end - args.slices[s].begin, here = (size + width - 1) / width;
            if (at < here)
                return {s, at * width, size - at * width < width ? size - at * width : width,
                        args.slices[s].begin + at * width};
            at -= here;
        }
    }

    // desk.left = the segment's rows of a tensor by route, masked
    void gather_routes(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const Dropout* mask,
                       float* left) const {
        gather(rows, plan.order + s.begin, s.count, begin, end, left);
        mask_rows(s, begin, end, mask, left, LEFT_STRIDE);
    }

    // The same of a tensor that lies in the order of the plan.
    void gather_places(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const Dropout* mask,
                       float* left) const {
        gather_run(rows, s.begin, s.count, begin, end, left);
        mask_rows(s, begin, end, mask, left, LEFT_STRIDE);
    }

    void mask_rows(const Segment& s, int64_t begin, int64_t end, const Dropout* mask, float* rows,
                   int64_t stride) const {
        if (!mask || !mask->on) return;
        for (int64_t i = 0; i < s.count; ++i) {
            const int64_t route = plan.order[s.begin + i];
            drop(*mask, route / slots, route % slots, begin, end, rows + i * stride);
        }
    }

    // Whether products with this matrix are of pairs of bfloat16: rows and weights are.
    bool paired(const gs_matrix& m) const {
        return HAS_PAIRS && bf16 && (m.format == GS_PLAIN_BF16 || m.format == GS_PACKED_BF16);
    }

    // Rows for the left of a product, as floats or as they are.
    void lay(const Rows& rows, const int64_t* list, int64_t first, int64_t count, int64_t begin, int64_t end,
             bool pairs, float* left) const {
        if (!pairs)
            return list ? gather(rows, list, count, begin, end, left)
                        : gather_run(rows, first, count, begin, end, left);
        const int64_t bytes = 2 * (end - begin), all = 2 * DEPTH;
        for (int64_t i = 0; i < count; ++i) {
            char* row = reinterpret_cast<char*>(left) + i * LEFT_STRIDE * 2;
            std::memcpy(row, rows.at(list ? list[i] : first + i, begin), static_cast<size_t>(bytes));
            if (bytes < all) std::memset(row + bytes, 0, static_cast<size_t>(all - bytes));
        }
    }
    void lay_routes(const Rows& rows, const Segment& s, int64_t begin, int64_t end, bool pairs, float* left) const {
        lay(rows, plan.order + s.begin, 0, s.count, begin, end, pairs, left);
    }
    void lay_places(const Rows& rows, const Segment& s, int64_t begin, int64_t end, bool pairs, float* left) const {
        lay(rows, nullptr, s.begin, s.count, begin, end, pairs, left);
    }

    // sums += left W^T over inputs [begin, end), 32 outputs from `row` on
    void add_outputs(const gs_matrix& m, const Segment& s, int64_t row, int64_t begin, int64_t end, const Desk& desk,
                     float* sums) const {
        with_code(m.format, [&](auto code) {
            using Code = decltype(code);
            if constexpr (HAS_PAIRS && Code::per_word == 2) {
                if (paired(m)) {
                    auto* words = reinterpret_cast<uint32_t*>(desk.stripes);
                    outputs_pairs<Code>(m, s.expert, row, begin, end, words);
                    return multiply_pairs(reinterpret_cast<const uint32_t*>(desk.left), s.count, words, end - begin,
                                          sums);
                }
            }
            outputs_stripe<Code>(m, s.expert, row, begin, end, desk.stripes);
            multiply(desk.left, s.count, desk.stripes, end - begin, sums);
        });
    }

    // sums[i] += left W over outputs [begin, end), the i-th 32 of `span` inputs from `col` on
    void add_inputs(const gs_matrix& m, const Segment& s, int64_t begin, int64_t end, int64_t col, const Desk& desk,
                    float* sums) const {
        with_code(m.format, [&](auto code) {
            using Code = decltype(code);
            if constexpr (HAS_PAIRS && Code::per_word == 2) {
                if (paired(m)) {
                    auto* words = reinterpret_cast<uint32_t*>(desk.stripes);
                    inputs_pairs<Code>(m, s.expert, begin, end, col, words);
                    return multiply_pairs(reinterpret_cast<const uint32_t*>(desk.left), s.count, words, end - begin,
                                          sums);
                }
            }
            inputs_stripes<Code>(m, s.expert, begin, end, col, desk.stripes);
            for (int i = 0; i < span(m.format) / STRIPE; ++i)
                multiply(desk.left, s.count, desk.stripes + i * DEPTH * STRIPE, end - begin, sums + i * ROWS * STRIPE);
        });
    }

    // thin[place][r] = sum_k rows[place][k] factor[k, r]: what a LoRA does first
    template <class Gather>
    void thin(const Segment& s, int64_t depth, const Factor& factor, int64_t ranks, const Gather& gather_left,
              const Desk& desk, float* out) const {
        for (int64_t r = 0; r < ranks; r += STRIPE) {
            clear(desk.sums, s.count);
            for (int64_t k = 0; k < depth; k += DEPTH) {
                const int64_t end = k + DEPTH < depth ? k + DEPTH : depth;
                gather_left(k, end, desk.left);
                factor_stripe(factor, k, end, r, ranks, desk.stripes);
                if (ranks - r <= 16)
                    multiply<16>(desk.left, s.count, desk.stripes, end - k, desk.sums);
                else
                    multiply(desk.left, s.count, desk.stripes, end - k, desk.sums);
            }
            const int64_t width = ranks - r < STRIPE ? ranks - r : STRIPE;
            for (int64_t i = 0; i < s.count; ++i)
                std::memcpy(out + (s.begin + i) * ranks + r, desk.sums + i * STRIPE, static_cast<size_t>(width) * 4);
        }
    }

    // sums[i][c] += scale * sum_r thin[place][r] factor[r, col + c]: what a LoRA does last
    void wide(const Segment& s, const float* thin, int64_t ranks, double scale, const Factor& factor, int64_t col,
              int64_t columns, const Desk& desk, float* sums) const {
        for (int64_t r = 0; r < ranks; r += DEPTH) {
            const int64_t end = r + DEPTH < ranks ? r + DEPTH : ranks;
            for (int64_t i = 0; i < s.count; ++i)
                for (int64_t k = r; k < end; ++k)
                    desk.left[i * LEFT_STRIDE + k - r] = static_cast<float>(scale) * thin[(s.begin + i) * ranks + k];
            factor_stripe(factor, r, end, col, columns, desk.stripes);
            multiply(desk.left, s.count, desk.stripes, end - r, sums);
        }
    }

    static void clear(float* sums, int64_t rows) { std::memset(sums, 0, static_cast<size_t>(rows) * STRIPE * 4); }

private:
    const Region<float> left_, stripes_, sums_, more_;
};

}  // namespace gs::GS_LEVEL
