// Products of pairs of bfloat16, on levels with such an instruction: words of two neighbouring k on both sides, sums in
// float32. bfloat16 rows and weights are used directly. Other weights are cut into as many bfloat16 terms as represent
// them exactly, so nothing is rounded.
#pragma once

#include "../tiles/instructions.h"
#include "fused.h"

namespace gs::GS_LEVEL {

constexpr int STEP = 32;                      // k of a tile; both sides are padded with zeros to a multiple of it
constexpr int PAIR_STRIDE = LEFT_STRIDE / 2;  // words of a row of the left side in scratch

inline int64_t padded(int64_t depth) { return (depth + STEP - 1) / STEP * STEP; }

// The left side of a product: rows of words.
struct Left {
    const void* rows;
    int64_t stride;  // words
};

// The right side of a product: words of outputs 0..15 and 16..31; strides from one pair of k to the next (pair) and
// from 32 k to the next 32 (step).
struct Right {
    const uint32_t *first, *second;
    int64_t pair, step;
};

#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;

inline Right striped(const uint32_t* words) { return {words, words + 16, STRIPE, STRIPE * STEP / 2}; }

// W[n, k] and W[n, k + 1] for 32 outputs from `row` on and inputs [begin, end). Packed tiles are used in place, because
// they have the product's order; the caller's rows are transposed into `words`.
template <class Code>
Right outputs_pairs(const gs_matrix& m, int64_t expert, int64_t row, int64_t begin, int64_t end, uint32_t* words) {
    const bool two = row + 16 < m.rows;
    if constexpr (!Code::plain) {
        const Panel low = panel_of(m, expert, row, false), high = two ? panel_of(m, expert, row + 16, false) : low;
        const int64_t offset = TILE * (begin / STEP), bytes = TILE * ((end - begin + STEP - 1) / STEP);
        fetch(low.data + offset + bytes, 64, static_cast<int>(bytes / 64));
        if (two) fetch(high.data + offset + bytes, 64, static_cast<int>(bytes / 64));
        return {reinterpret_cast<const uint32_t*>(low.data + offset),
                reinterpret_cast<const uint32_t*>(high.data + offset), 16, TILE / 4};
    } else {
        const __m512i none = _mm512_setzero_si512();
        const int64_t count = (end - begin + 1) / 2, all = padded(end - begin) / 2;
        for (int half = 0; half < 2; ++half) {
            uint32_t* out = words + 16 * half;
            int64_t word = 0;
            if (half == 0 || two) {
                const Panel panel = panel_of(m, expert, row + 16 * half, true);
                uint32_t scratch[256];
                for (int64_t tile = begin / STEP; word < count; ++tile) {
                    const uint32_t* from = tile_by_word<Code>(m, panel, tile, scratch);
                    fetch(panel.data + 64 * (tile + DEPTH / STEP), m.panel_bytes, panel.rows);
                    for (int i = 0; i < 16 && word < count; ++i, ++word)
                        _mm512_storeu_si512(out + word * STRIPE, _mm512_loadu_si512(from + 16 * i));
                }
            }
            for (; word < all; ++word) _mm512_storeu_si512(out + word * STRIPE, none);
        }
        return striped(words);
    }
}

// words[(n - begin) / 2][k - col] = W[n, k] and W[n + 1, k], for 32 inputs from `col` on
template <class Code>
Right inputs_pairs(const gs_matrix& m, int64_t expert, int64_t begin, int64_t end, int64_t col, uint32_t* words) {
    alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    uint32_t scratch[256];
    for (int64_t row = begin; row < end; row += 16) {
        const Panel panel = panel_of(m, expert, row, Code::plain);
        const Block block = tile_by_row<Code>(m, panel, col / 32, scratch);
        if constexpr (Code::plain)
            fetch(panel.data + DEPTH * m.panel_bytes + 64 * (col / 32), m.panel_bytes, 16);
        else
            fetch(panel.data + DEPTH / 16 * m.panel_bytes + TILE * (col / 32), 64, 16);
        uint32_t* out = words + (row - begin) / 2 * STRIPE;
        for (int i = 0; i < 16; i += 2, out += STRIPE) {
            const __m512i a = _mm512_loadu_si512(block.row(i)), b = _mm512_loadu_si512(block.row(i + 1));
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }
    for (int64_t word = (end - begin + 15) / 16 * 8; word < padded(end - begin) / 2; ++word)
        std::memset(words + word * STRIPE, 0, STRIPE * 4);
    return striped(words);
}

// Moves the upper 8 mantissa bits of every float of a stripe to words of two neighbouring rows; the stripe keeps the
// remainders. Truncates instead of rounding: nothing overflows, and three cuts hold all 24 bits.
inline Right peel(float* stripe, int64_t depth, uint32_t* words) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512 infinite = _mm512_set1_ps(__builtin_inff());
    const auto rest = [&](float* at, __m512 value, __m512i cut) {  // the remainder of infinity is 0, not NaN
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(value), infinite, _CMP_NEQ_UQ);
        _mm512_storeu_ps(at, _mm512_maskz_sub_ps(finite, value, _mm512_castsi512_ps(cut)));
    };
    for (int64_t k = 0; k < depth; k += 2, words += STRIPE)
        for (int c = 0; c < STRIPE; c += 16) {
            float* at = stripe + k * STRIPE + c;
            const __m512 a = _mm512_loadu_ps(at),
                         b = k + 1 < depth ? _mm512_loadu_ps(at + STRIPE) : _mm512_setzero_ps();
            const __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), upper),
                          high_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
            _mm512_storeu_si512(words + c, _mm512_or_si512(_mm512_srli_epi32(high_a, 16), high_b));
            rest(at, a, high_a);
            if (k + 1 < depth) rest(at + STRIPE, b, high_b);
        }
    const int64_t made = (depth + 1) / 2, all = padded(depth) / 2;
    std::memset(words, 0, static_cast<size_t>(all - made) * STRIPE * 4);
    return striped(words - made * STRIPE);
}

#if defined(__AMX_BF16__)

// Uses two by two tiles of sums. Rows beyond the last one are computed from arbitrary data and never read.
inline void multiply_pairs(const Left& left, int64_t rows, const Right& right, int64_t depth, float* sums) {
    const int64_t steps = padded(depth) / STEP, pair = right.pair * 4, wide = left.stride * 4;
    // gcc's tile intrinsics do not declare that they read and write memory
    __asm__ volatile("" ::: "memory");
    for (int64_t t = 0; t < rows; t += 32) {
        const bool both = rows - t > 16;
        const uint32_t *upper = static_cast<const uint32_t*>(left.rows) + t * left.stride,
                       *lower = upper + 16 * left.stride, *first = right.first, *second = right.second;
        float *top = sums + t * STRIPE, *bottom = top + 16 * STRIPE;
        TILE_LOAD(0, top, STRIPE * 4);
        TILE_LOAD(1, top + 16, STRIPE * 4);
        if (both) {
            TILE_LOAD(2, bottom, STRIPE * 4);
            TILE_LOAD(3, bottom + 16, STRIPE * 4);
        }
        for (int64_t k = 0; k < steps; ++k, first += right.step, second += right.step) {
            TILE_LOAD(6, first, pair);
            TILE_LOAD(7, second, pair);
            TILE_LOAD(4, upper + 16 * k, wide);
            TILE_DOT(0, 4, 6);
            TILE_DOT(1, 4, 7);
            if (!both) continue;
            TILE_LOAD(5, lower + 16 * k, wide);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        TILE_STORE(0, top, STRIPE * 4);
        TILE_STORE(1, top + 16, STRIPE * 4);
        if (both) {
            TILE_STORE(2, bottom, STRIPE * 4);
            TILE_STORE(3, bottom + 16, STRIPE * 4);
        }
    }
    __asm__ volatile("" ::: "memory");
}

#else

template <int M> void multiply_pair_rows(const uint32_t* left, const Right& right, int64_t pairs, float* sums) {
    __m512 sum[M][2];
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
    const uint32_t *first = right.first, *second = right.second;
    const int64_t pair = right.pair;
    for (int64_t k = 0; k < pairs; ++k, first += pair, second += pair) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(first), b1 = (__m512bh)_mm512_loadu_si512(second);
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t) {
            const __m512bh a = (__m512bh)_mm512_set1_epi32(static_cast<int>(left[t * PAIR_STRIDE + k]));
            sum[t][0] = _mm512_dpbf16_ps(sum[t][0], a, b0);
            sum[t][1] = _mm512_dpbf16_ps(sum[t][1], a, b1);
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t)
        for (int c = 0; c < 2; ++c) {
            float* at = sums + t * STRIPE + 16 * c;
            _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum[t][c]));
        }
}

using MultiplyPairs = void (*)(const uint32_t*, const Right&, int64_t, float*);
template <int... M> MultiplyPairs pick_pairs(Counts<M...>, int rows) {
    static constexpr MultiplyPairs known[] = {multiply_pair_rows<M>...};
    return known[rows - 1];
}

inline void multiply_pairs(const Left& left, int64_t rows, const Right& right, int64_t depth, float* sums) {
    const int64_t blocks = (rows + AT_ONCE - 1) / AT_ONCE;
    for (int64_t i = 0, begin = 0; i < blocks; ++i) {
        const int64_t end = rows * (i + 1) / blocks;
        pick_pairs(UpTo<AT_ONCE>{}, static_cast<int>(end - begin))(
            static_cast<const uint32_t*>(left.rows) + begin * PAIR_STRIDE, right, (depth + 1) / 2,
            sums + begin * STRIPE);
        begin = end;
    }
}

#endif

#else

constexpr bool HAS_PAIRS = false;  // the functions below are never called

template <class Code> Right outputs_pairs(const gs_matrix&, int64_t, int64_t, int64_t, int64_t, uint32_t*);
template <class Code> Right inputs_pairs(const gs_matrix&, int64_t, int64_t, int64_t, int64_t, uint32_t*);
Right peel(float*, int64_t, uint32_t*);
void multiply_pairs(const Left&, int64_t, const Right&, int64_t, float*);

#endif

}  // namespace gs::GS_LEVEL
