// sums[t][n] += (sum_k row[t][k] * code[k][n]) * scale of n * scale of t, group by group: sums over k are whole numbers
// and exact, so every level gives the same bits.
#pragma once

#include "int8_words.h"
#include "multiply.h"
#include "tiles.h"

namespace gs::GS_LEVEL {

constexpr int64_t PART = UNIT == 64 ? 512 : 256;  // numbers of a row at a time: 8 or 16 KiB of weights stay in L1

// `groups` groups of `length` numbers; or a part of one group, of which `first` and `last` say where it lies.
struct Product {
    const Octet* left;  // [rows][stride]: of a row, group by group
    int64_t stride;
    const float* scales;  // [rows][scale_stride]: of a row's groups; where their sums begin likewise
    const int32_t* starts;
    int64_t scale_stride, rows;
    const uint32_t* words;  // [groups * length / OCTETS][STRIPE]
    const float* weights;   // [groups][STRIPE]: their scales
    int64_t groups, length;
    bool first, last;
    int32_t* partial;  // [ROWS][STRIPE]: sums of a group whose end is to come
    float* sums;       // [rows][STRIPE]
};

#if defined(__AMX_INT8__)

#if defined(GS_TILES_IN_SOFTWARE)

template <int SUM, int A, int B> void tile_dot_bytes() {
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 16; ++j)
                for (int byte = 0; byte < 32; byte += 8)
                    tile_data[SUM][i][j] += static_cast<uint32_t>(static_cast<int8_t>(tile_data[A][i][k] >> byte) *
                                                                  static_cast<int8_t>(tile_data[B][k][j] >> byte));
}

#define TILE_DOT_BYTES(sum, a, b) tile_dot_bytes<sum, a, b>()

#else

#define TILE_DOT_BYTES(sum, a, b) _tile_dpbssd(sum, a, b)

#endif

// Two by two tiles of sums; rows beyond the last one are computed from what lies there and never read.
inline void multiply_octets(const Product p) {
    constexpr int64_t wide = STRIPE * 4;
    __asm__ volatile("" ::: "memory");  // gcc 12 does not know that tile loads read memory
    for (int64_t t = 0; t < p.rows; t += 32) {
        const bool both = p.rows - t > 16;
        int32_t *top = p.partial + t * STRIPE, *bottom = top + 16 * STRIPE;
        for (int64_t g = 0; g < p.groups; ++g) {
            const Octet *upper = p.left + t * p.stride + g * p.length, *lower = upper + 16 * p.stride;
            const uint32_t* from = p.words + g * p.length / OCTETS * STRIPE;
            if (p.first) {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            } else {
                TILE_LOAD(0, top, wide);
                TILE_LOAD(1, top + 16, wide);
                TILE_LOAD(2, bottom, wide);
                TILE_LOAD(3, bottom + 16, wide);
            }
            for (int64_t k = 0; k < p.length; k += UNIT, from += 16 * STRIPE) {
                TILE_LOAD(6, from, wide);
                TILE_LOAD(7, from + 16, wide);
                TILE_LOAD(4, upper + k, p.stride);
                TILE_DOT_BYTES(0, 4, 6);
                TILE_DOT_BYTES(1, 4, 7);
                if (!both) continue;
                TILE_LOAD(5, lower + k, p.stride);
                TILE_DOT_BYTES(2, 5, 6);
                TILE_DOT_BYTES(3, 5, 7);
            }
            TILE_STORE(0, top, wide);
            TILE_STORE(1, top + 16, wide);
            TILE_STORE(2, bottom, wide);
            TILE_STORE(3, bottom + 16, wide);
            __asm__ volatile("" ::: "memory");
            if (!p.last) continue;
            const int64_t end = p.rows - t < 32 ? p.rows : t + 32;
            const Floats weights[] = {load(p.weights + g * STRIPE), load(p.weights + g * STRIPE + LANES)};
            for (int64_t i = t; i < end; ++i)
                for (int c = 0; c < 2; ++c) {
                    float* at = p.sums + i * STRIPE + LANES * c;
                    const Floats value = to_floats(load_words(p.partial + i * STRIPE + LANES * c)) * weights[c];
                    store(at, load(at) + value * all(p.scales[i * p.scale_stride + g]));
                }
        }
    }
}

#else

// M rows from row `begin` on. The arguments by value: what a store might write, the compiler would read again.
template <int M> void multiply_octet_rows(const Product p, int64_t begin) {
    const auto* row = reinterpret_cast<const char*>(p.left + begin * p.stride);
    const int64_t bytes = p.stride * static_cast<int64_t>(sizeof(Octet)), count = p.length / OCTETS;
    const int64_t first_scale = begin * p.scale_stride;
    for (int64_t g = 0; g < p.groups; ++g, row += 4 * count)
        for (int column = 0; column < STRIPE; column += 16 * ABREAST) {
            Words sum[M][ABREAST];
#pragma GCC unroll 16
            for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c)
                    sum[t][c] = p.first
                                    ? all_words(static_cast<uint32_t>(p.starts[first_scale + t * p.scale_stride + g]))
                                    : load_words(p.partial + (begin + t) * STRIPE + column + 16 * c);
            const uint32_t* words = p.words + g * count * STRIPE + column;
            for (int64_t k = 0; k < count; ++k, words += STRIPE) {
                Words b[ABREAST];
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c) b[c] = load_words(words + 16 * c);
#pragma GCC unroll 16
                for (int t = 0; t < M; ++t) {
                    uint32_t a;
                    std::memcpy(&a, row + t * bytes + 4 * k, 4);
#pragma GCC unroll 2
                    for (int c = 0; c < ABREAST; ++c) sum[t][c] = dot(sum[t][c], b[c], a);
                }
            }
            if (!p.last) {
#pragma GCC unroll 16
                for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                    for (int c = 0; c < ABREAST; ++c)
                        keep_words(reinterpret_cast<uint32_t*>(p.partial) + (begin + t) * STRIPE + column + 16 * c,
                                   sum[t][c]);
                continue;
            }
            Floats weights[ABREAST];
            for (int c = 0; c < ABREAST; ++c) weights[c] = load(p.weights + g * STRIPE + column + 16 * c);
#pragma GCC unroll 16
            for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c) {
                    float* at = p.sums + (begin + t) * STRIPE + column + 16 * c;
                    const Floats scale = all(p.scales[first_scale + t * p.scale_stride + g]);
                    store(at, load(at) + to_floats(sum[t][c]) * weights[c] * scale);
                }
        }
}

using MultiplyOctets = void (*)(const Product, int64_t);
template <int... M> MultiplyOctets pick_octets(Counts<M...>, int rows) {
    static constexpr MultiplyOctets known[] = {multiply_octet_rows<M>...};
    return known[rows - 1];
}

inline void multiply_octets(const Product& p) {
    const int64_t blocks = (p.rows + AT_ONCE - 1) / AT_ONCE;
    for (int64_t i = 0, begin = 0; i < blocks; ++i) {
        const int64_t end = p.rows * (i + 1) / blocks;
        pick_octets(UpTo<AT_ONCE>{}, static_cast<int>(end - begin))(p, begin);
        begin = end;
    }
}

#endif

}  // namespace gs::GS_LEVEL
