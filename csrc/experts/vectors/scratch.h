// A worker's scratch memory, pieces of features, and helpers that read the arguments.
#pragma once

#include "../arithmetic/activation.h"
#include "../few_rows/inputs.h"

namespace gs::GS_LEVEL {

inline bool given(const gs_tensor& t) { return t.dtype != GS_NONE; }

inline float weight_at(const gs_moe_args& args, int64_t route) {
    return matrix_of(args.weights).at(route / args.slots, route % args.slots);
}

// <dy, bd> of a route: the contribution of down's bias to the gradient of the route's weight.
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

// The scratch memory of one worker.
struct Scratch {
    float *left, *stripes, *sums, *more;
    uint32_t* words;
};

// A piece of up to 32 (or span) intermediate features of one slice.
struct Columns {
    int64_t slice, first, width, begin;  // first: index in the slice; begin: index in the whole
};

constexpr int STRIPES = WIDEST / STRIPE;
// Most blocks of 32 sums per row of an item; the rows on the left are prepared once for all of them. With AVX-512 and
// at most 128 rows, 16 blocks fill 256 KiB of L2 and make a backward 2 to 4 % faster than 8; a forward takes the same
// time (measured as in fused.h).
#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr int BLOCKS = 16;
#else
constexpr int BLOCKS = 8;
#endif
constexpr int PANELS = 8;  // most blocks for a chunk's y: with two thousand routes and more, longer rows gain nothing

// Copies a segment's sums, `stripes` blocks of scratch, to the rows of its routes in `results`: [routes][stripes * 32],
// from route `first` on. Goes row by row with prefetching, because rows are far apart and two thousand exceed L2.
inline void scatter_rows(const Grouping& grouping, const Segment& s, int64_t first, int64_t stripes,
                         const Scratch& scratch, float* results) {
    constexpr int64_t ahead = 4;
    const auto row_of = [&](int64_t i) { return results + (grouping.order[s.begin + i] - first) * stripes * STRIPE; };
    for (int64_t i = 0; i < s.count; ++i) {
        if (i + ahead < s.count) fetch_row(reinterpret_cast<const char*>(row_of(i + ahead)), stripes * STRIPE * 4);
        float* row = row_of(i);
        for (int64_t k = 0; k < stripes; ++k)
            std::memcpy(row + k * STRIPE, scratch.sums + (k * ROWS + i) * STRIPE, STRIPE * 4);
    }
}

// The position where a later item begins.
struct NextItem {
    int64_t expert, first;
};

// Number of bfloat16 terms that represent a weight of this matrix exactly, which is the number of pair products; 0:
// float products are as fast. Signed 4-bit codes times a scale of 8 or 11 bits have at most 15 bits, int8 codes 7 + 8.
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

// Elements per row for tiles: a multiple of 32, plus padding so that rows do not map to the same cache sets.
inline int64_t sheet_columns(int64_t columns) { return padded(columns) + STEP; }

}  // namespace gs::GS_LEVEL
