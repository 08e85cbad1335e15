// Unscaled codes as tiles for the right side of y = W x. Integers and E4M3 are exact in bfloat16, so one product
// replaces two or three of scaled weights, and the scales of a group are multiplied into its sums.
#pragma once

#include "../few_rows/outputs.h"
#include "weights.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

// Whether unscaled codes are used: for groups of whole steps, or one group per row. For codes that are cheap to decode
// to two terms (powers_of_two.h), scaled weights are faster than sums of one or two steps.
inline bool takes_codes(const gs_matrix& m) {
    if (m.format == GS_INT4 && m.scale_dtype == GS_BF16 && m.group <= 2 * STEP_OF_TILE) return false;
    const bool kind =
        m.format == GS_INT4 || m.format == GS_INT4_ASYM || m.format == GS_INT8 || m.format == GS_FP8_BLOCK;
    return kind && (m.group % STEP_OF_TILE == 0 || m.group >= m.cols);
}

// Number of products per weight: 1 with unscaled codes.
inline int cuts_on_the_right(const gs_matrix& m) { return takes_codes(m) ? 1 : cuts(m); }

// Decodes a tile of inputs [32 block, 32 block + 32) of a panel, with zeros beyond the last one.
template <class Code> void code_tile(const gs_matrix& m, const Panel& panel, int64_t block, char* to) {
    constexpr int e = Code::per_word, words = 32 / e, tile_inputs = 16 * e;
    const int64_t first = STEP_OF_TILE * block;
    const uint32_t* tile =
        reinterpret_cast<const uint32_t*>(panel.data + TILE * (first / tile_inputs)) + first % tile_inputs / e * 16;
    if constexpr (e == 8) {
        static constexpr auto values = table_of<Code>();
        const __m512i table = _mm512_load_si512(values.bits), nibble = _mm512_set1_epi32(0x000f000f);
        __m512i offset = _mm512_setzero_si512();
        if constexpr (Code::zeros) {
            offset = to_words(zeros_of(m, panel, first / m.group)).v;
            offset = _mm512_or_si512(offset, _mm512_slli_epi32(offset, 16));
        }
        for (int word = 0; word < words; ++word, to += 256) {
            if (first + word * e >= m.cols) {
                std::memset(to, 0, 256);
                continue;
            }
            const __m512i w = _mm512_loadu_si512(tile + 16 * word);
            const auto put = [&](int pair, __m512i codes) {
                if constexpr (Code::zeros) codes = _mm512_sub_epi16(_mm512_and_si512(codes, nibble), offset);
                _mm512_store_si512(to + 64 * pair, _mm512_permutexvar_epi16(codes, table));
            };
            put(0, w), put(1, _mm512_srli_epi32(w, 4)), put(2, _mm512_srli_epi32(w, 8)),
                put(3, _mm512_srli_epi32(w, 12));
        }
    } else {
        const Cutter cutter;
        for (int word = 0; word < words; ++word, to += 128) {
            Floats value[e];
            Code::unit(load_words(tile + 16 * word), value);
            for (int j = 0; j < e; ++j)
                if (first + word * e + j >= m.cols) value[j] = zero();
            _mm512_store_si512(to, cutter.last_pair(value[0].v, value[1].v));
            _mm512_store_si512(to + 64, cutter.last_pair(value[2].v, value[3].v));
        }
    }
}

// Decodes tiles of 32 outputs from `row` on, blocks [0, count): [block][2], and their scales[group][32].
template <class Code>
void code_tiles(const gs_matrix& m, int64_t expert, int64_t row, int64_t count, char* out, float* scales) {
    const int64_t groups = (m.cols + m.group - 1) / m.group;
    for (int half = 0; half < 2; ++half) {
        char* to = out + half * TILE_BYTES;
        if (row + 16 * half >= m.rows) {  // their sums are computed and never read
            for (int64_t i = 0; i < count; ++i) std::memset(to + i * 2 * TILE_BYTES, 0, TILE_BYTES);
            for (int64_t g = 0; g < groups; ++g) store(scales + 32 * g + 16, zero());
            continue;
        }
        const Panel panel = panel_of(m, expert, row + 16 * half, false);
        const int64_t bytes = bytes_of_block(m, false);
        for (int64_t g = 0; g < groups; ++g) store(scales + 32 * g + 16 * half, scales_of(m, panel, g));
        for (int64_t block = 0; block < count; ++block, to += 2 * TILE_BYTES) {
            if (block % 4 == 0) fetch(panel.data + bytes * block + 4096, 64, static_cast<int>(bytes / 16));
            code_tile<Code>(m, panel, block, to);
        }
    }
}

// The 16 x 16 sums of up to four groups, stored from tiles; they are added while the next groups are multiplied.
struct Aside {
    const float *groups, *scales;  // [group][16][16], [group][32]
    int64_t count;
    float* sums;  // rows of 32
    bool first;

    void add() const {
        for (int i = 0; i < 16; ++i) {
            __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + 32 * i);
            for (int64_t g = 0; g < count; ++g)
                sum = _mm512_fmadd_ps(_mm512_load_ps(groups + 256 * g + 16 * i), _mm512_load_ps(scales + 32 * g), sum);
            _mm512_store_ps(sums + 32 * i, sum);
        }
    }
};

// dot_codes for groups of one or two steps: 16 x 16 sums of four groups in turn, so that operands stay in L1.
inline void dot_short_groups(const Link& link, int64_t steps, const float* scales, bool tall, float* sums) {
    constexpr int64_t at_once = 4;
    alignas(64) float aside[2][at_once * 256];
    const int64_t groups = (link.steps + steps - 1) / steps;
    Aside waiting{};
    int turn = 0;
    __asm__ volatile("" ::: "memory");
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t from = 0; from < groups; from += at_once) {
        const int64_t count = groups - from < at_once ? groups - from : at_once;
        for (int row = 0; row < (tall ? 2 : 1); ++row)
            for (int col = 0; col < 2; ++col, turn ^= 1) {
                const auto begin = [&](int64_t g) { return (from + g) * steps; };
                const auto end = [&](int64_t g) {
                    return (from + g + 1) * steps < link.steps ? (from + g + 1) * steps : link.steps;
                };
                const char *a = row ? link.lower : link.upper, *b = col ? link.second : link.first;
                float* to = aside[turn];
#define GS_GROUP(sum, left, right)                         \
    if (count > sum) {                                     \
        for (int64_t k = begin(sum); k < end(sum); ++k) {  \
            TILE_LOAD(left, a + k * link.left_step, 64);   \
            TILE_LOAD(right, b + k * link.right_step, 64); \
            TILE_DOT(sum, left, right);                    \
            TILE_ZERO(left);                               \
            TILE_ZERO(right);                              \
        }                                                  \
        TILE_STORE(sum, to + 256 * sum, 64);               \
        TILE_ZERO(sum);                                    \
    }
                GS_GROUP(0, 4, 6)
                GS_GROUP(1, 5, 7)
                GS_GROUP(2, 4, 6)
                GS_GROUP(3, 5, 7)
#undef GS_GROUP
                __asm__ volatile("" ::: "memory");
                if (waiting.count) waiting.add();
                waiting = {to, scales + 32 * from + 16 * col, count, sums + 32 * 16 * row + 16 * col, from == 0};
            }
    }
    if (waiting.count) waiting.add();
}

// sums[32][32] = the sum over the groups of scales * product of codes.
inline void dot_codes(const gs_matrix& m, const Link& link, const float* scales, bool tall, const Ahead& ahead,
                      float* sums) {
    if (link.steps == 0) return dot<ON_THE_RIGHT>(&link, 1, 1, tall, true, ahead, sums);
    const int64_t steps = m.group >= m.cols ? link.steps : m.group / STEP_OF_TILE;
    if (steps <= 2 && steps < link.steps) return dot_short_groups(link, steps, scales, tall, sums);
    alignas(64) float group[32 * 32];
    for (int64_t from = 0; from < link.steps; from += steps, scales += 32) {
        Link part = link;
        part.steps = link.steps - from < steps ? link.steps - from : steps;
        part.upper += from * link.left_step, part.lower += from * link.left_step;
        part.first += from * link.right_step, part.second += from * link.right_step;
        dot<ON_THE_RIGHT>(&part, 1, 1, tall, true, ahead, group);
        for (int i = 0; i < (tall ? 32 : 16); ++i)
            for (int j = 0; j < 32; j += 16) {
                const __m512 before = from ? _mm512_load_ps(sums + 32 * i + j) : _mm512_setzero_ps();
                _mm512_store_ps(sums + 32 * i + j, _mm512_fmadd_ps(_mm512_load_ps(group + 32 * i + j),
                                                                   _mm512_load_ps(scales + j), before));
            }
    }
}

}  // namespace gs::GS_LEVEL

#endif
