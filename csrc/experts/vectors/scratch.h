// What the steps of a call work with: a worker's scratch, pieces of features, and small questions about the arguments.
#pragma once

#include "../arithmetic/activation.h"
#include "../few_rows/inputs.h"

namespace gs::GS_LEVEL {

inline bool given(const gs_tensor& t) { return t.dtype != GS_NONE; }

inline float weight_at(const gs_moe_args& args, int64_t route) {
    return matrix_of(args.weights).at(route / args.slots, route % args.slots);
}

// <dy, bd> of a route: what a bias of the rows of down adds to the gradient of the route's weight.
inline float dot_bias(const gs_moe_args& args, const Rows& dy, int64_t expert, int64_t route) {
    const Factor bias = matrix_of(args.down_bias);
    alignas(64) float values[DEPTH];
    float total = 0;
    for (int64_t k = 0; k < args.hidden; k += DEPTH) {
        const int64_t end = k + DEPTH < args.hidden ? k + DEPTH : args.hidden;
        float sum = 0;
        read(dy.at(route, k), dy.bf16, end - k, values);
        for (int64_t j = k; j < end; ++j) sum += values[j - k] * bias.at(expert, j);
        total += sum;
    }
    return total;
}

// Scratch of one worker.
struct Desk {
    float *left, *stripes, *sums, *more;
    uint32_t* words;
};

// 32 intermediate features (or `width`) of one slice.
struct Columns {
    int64_t slice, first, width, begin;  // first: in the slice; begin: in the whole
};

constexpr int STRIPES = WIDEST / STRIPE;
// Blocks of 32 sums a row that an item has at most: rows are laid on the left once for all of them. With AVX-512 and
// 128 rows at most, 16 are 256 KiB of L2 and 2 to 4 % less of a backward than 8; a forward is as quick (where fused.h
// says).
#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr int BLOCKS = 16;
#else
constexpr int BLOCKS = 8;
#endif
constexpr int PANELS = 8;  // of them for a chunk's y: longer rows, of two thousand routes and more, gain nothing

// A segment's sums, `stripes` blocks of a desk, to where its routes are in `found`: [routes][stripes * 32], from route
// `first` on. Row by row, and each row fetched before: they lie far apart, and two thousand do not stay in L2.
inline void keep_rows(const Plan& plan, const Segment& s, int64_t first, int64_t stripes, const Desk& desk,
                      float* found) {
    constexpr int64_t ahead = 4;
    const auto row_of = [&](int64_t i) { return found + (plan.order[s.begin + i] - first) * stripes * STRIPE; };
    for (int64_t i = 0; i < s.count; ++i) {
        if (i + ahead < s.count) fetch_row(reinterpret_cast<const char*>(row_of(i + ahead)), stripes * STRIPE * 4);
        float* row = row_of(i);
        for (int64_t k = 0; k < stripes; ++k)
            std::memcpy(row + k * STRIPE, desk.sums + (k * ROWS + i) * STRIPE, STRIPE * 4);
    }
}

// Where an item begins that comes later.
struct After {
    int64_t expert, first;
};

// How many bfloat16 hold a weight of this matrix, and so how many products of pairs there are; 0: no more than floats
// cost. Codes of 4 bits with their sign times a scale of 8 or 11 bits have 15 at most, those of int8 7 + 8.
inline int cuts(const gs_matrix& m) {
    const bool bf16_scale = m.scale_dtype == GS_BF16, short_scale = bf16_scale || m.scale_dtype == GS_F16;
    switch (m.format) {
        case GS_PLAIN_BF16:
        case GS_PACKED_BF16:
        case GS_MXFP4: return 1;
        case GS_INT4:
        case GS_INT4_ASYM: return !HAS_TILES ? 0 : short_scale ? 2 : 3;
        case GS_INT8: return !HAS_TILES ? 0 : bf16_scale ? 2 : 3;
        default: return HAS_TILES ? 3 : 0;
    }
}

// Elements of a row that tiles read: a multiple of their 32, and rows that do not fall on each other's cache sets.
inline int64_t sheet_columns(int64_t columns) { return padded(columns) + STEP; }

}  // namespace gs::GS_LEVEL
