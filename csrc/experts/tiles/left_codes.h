// Unscaled codes as tiles for the left side of dx = W^T dy. Integers and E4M3 are exact in bfloat16, so one product
// replaces three of codes times 24-bit scales. A scale of 128 x 128 weights is multiplied into the sums over its 128
// outputs; a scale of a whole row is multiplied into dy, before dg and du are rounded.
#pragma once

#include "rows.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

enum LeftWay { CUT, BY_BLOCK, FOLDED };

inline LeftWay left_way(const gs_matrix& m) {
    if (m.format == GS_FP8_BLOCK) return BY_BLOCK;
    return m.format == GS_INT8 && m.group >= m.cols ? FOLDED : CUT;
}

inline int cuts_on_the_left(const gs_matrix& m) { return left_way(m) == CUT ? cuts(m) : 1; }

// The scales of 32 outputs from `row` on, with zeros beyond the last one.
inline void row_scales(const gs_matrix& m, int64_t expert, int64_t row, Floats& low, Floats& high) {
    low = scales_of(m, panel_of(m, expert, row, false), 0);
    high = row + 16 < m.rows ? scales_of(m, panel_of(m, expert, row + 16, false), 0) : zero();
}

constexpr int FOLDED_CUTS = 2;  // terms of a product that is not an operand itself: exact to 2^-17

// Multiplies tiles of two groups of transposed rows by the scales of the weights' rows: [block][cut][2]. second may be
// null.
inline void fold_scales(const gs_matrix& m, int64_t expert, const char* first, const char* second, int64_t blocks,
                        char* out) {
    const Cutter cutter;
    const __m512i upper = cutter.upper;
    for (int64_t block = 0; block < blocks; ++block, out += FOLDED_CUTS * 2 * TILE_BYTES) {
        alignas(64) float low[16], high[16];
        Floats a, b;
        row_scales(m, expert, 32 * block, a, b);
        store(low, a), store(high, b);
        for (int half = 0; half < (second ? 2 : 1); ++half) {
            const char* from = (half ? second : first) + block * TILE_BYTES;
            char* to = out + half * TILE_BYTES;
            for (int i = 0; i < 16; ++i, from += 64, to += 64) {
                const __m512i words = _mm512_load_si512(from);
                __m512 x = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_set1_ps(low[i])),
                       y = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(words, upper)), _mm512_set1_ps(high[i]));
                _mm512_store_si512(to, cutter.pair(x, y));
                _mm512_store_si512(to + 2 * TILE_BYTES,
                                   _mm512_or_si512(_mm512_srli_epi32(rounded_to_bfloat16(x), 16),
                                                   _mm512_and_si512(rounded_to_bfloat16(y), upper)));
            }
        }
    }
}

// Addresses of the scales of a matrix's blocks of 128 outputs, for one block of inputs.
struct BlockScales {
    const char* at;
    int64_t step;  // bytes
};

inline BlockScales block_scales(const gs_matrix& m, int64_t expert, int64_t input) {
    if (m.rows == 0) return {};
    return {panel_of(m, expert, 0, false).data + m.scales + input / m.group * 4, 8 * m.panel_bytes};
}

// sums[32][32] = the sum over the blocks of scale * product of codes. The sums of a block are added while the next
// block is multiplied.
inline void dot_blocks(const Link* links, const BlockScales* scales, int64_t count, bool wide, const Ahead& ahead,
                       float* sums) {
    constexpr int64_t steps = 4;
    alignas(64) float aside[2][32 * 32];
    const float* waiting = nullptr;
    float scale = 0;
    bool begun = false;
    int turn = 0;
    const auto add = [&] {
        const __m512 s = _mm512_set1_ps(scale);
        for (int i = 0; i < 32; ++i)
            for (int j = 0; j < (wide ? 32 : 16); j += 16) {
                const __m512 before = begun ? _mm512_load_ps(sums + 32 * i + j) : _mm512_setzero_ps();
                _mm512_store_ps(sums + 32 * i + j, _mm512_fmadd_ps(_mm512_load_ps(waiting + 32 * i + j), s, before));
            }
        begun = true;
    };
    for (int64_t i = 0; i < count; ++i)
        for (int64_t from = 0; from < links[i].steps; from += steps, turn ^= 1) {
            Link part = links[i];
            part.steps = part.steps - from < steps ? part.steps - from : steps;
            part.upper += from * part.left_step, part.lower += from * part.left_step;
            part.first += from * part.right_step, part.second += from * part.right_step;
            dot<ON_THE_LEFT>(&part, 1, 1, true, wide, ahead, aside[turn]);
            if (waiting) add();
            waiting = aside[turn];
            std::memcpy(&scale, scales[i].at + from / steps * scales[i].step, 4);
        }
    if (waiting)
        add();
    else
        std::memset(sums, 0, 32 * 32 * sizeof(float));
}

}  // namespace gs::GS_LEVEL

#endif
