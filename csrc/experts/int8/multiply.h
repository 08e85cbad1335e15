// sums[t][n] += (sum_k row[t][k] * code[k][n]) * scale of n * scale of t, group by group. The sums over k are exact
// integers, so every level gives the same bits.
#pragma once

#include "../tiles/instructions.h"
#include "rows.h"

namespace gs::GS_LEVEL {

// One product: `groups` groups of `length` numbers, or a part of one group; first, last: whether the part begins or
// ends the group.
struct Product {
    const Lot* left;
    int64_t rows;
    const uint32_t* words;  // [groups * length / OCTETS][STRIPE]
    const float* weights;   // [groups][STRIPE]: scales of the weights
    int64_t groups, length;
    bool first, last;
    int32_t* partial;           // [ROWS][STRIPE]: sums of an unfinished group
    float* sums;                // [rows][STRIPE]
    const char* next_codes[2];  // two panels to prefetch during the product, `next_bytes` of each, or null
    int64_t next_bytes;
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

// Uses two by two tiles of sums. Rows beyond the last one are computed from arbitrary data and never read.
inline void multiply_octets(const Product p) {
    constexpr int64_t wide = STRIPE * 4;
    for (const char* next : p.next_codes)
        if (next) fetch(next, 64, static_cast<int>(p.next_bytes / 64));
    __asm__ volatile("" ::: "memory");  // gcc 12 does not know that tile loads read memory
    for (int64_t t = 0; t < p.rows; t += 32) {
        const bool both = p.rows - t > 16;
        int32_t *top = p.partial + t * STRIPE, *bottom = top + 16 * STRIPE;
        for (int64_t g = 0; g < p.groups; ++g) {
            const Octet *upper = p.left[t].numbers + g * p.length, *lower = p.left[t + 16].numbers + g * p.length;
            const uint32_t* from = p.words + g * p.length / OCTETS * STRIPE;
            if (p.first) {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_ZERO(2);
                TILE_ZERO(3);
            } else {
                TILE_LOAD(0, top, wide);
                TILE_LOAD(1, top + 16, wide);
                if (both) {
                    TILE_LOAD(2, bottom, wide);
                    TILE_LOAD(3, bottom + 16, wide);
                }
            }
            for (int64_t k = 0; k < p.length; k += UNIT, from += 16 * STRIPE) {
                TILE_LOAD(6, from, wide);
                TILE_LOAD(7, from + 16, wide);
                TILE_LOAD(4, upper + k, sizeof(Lot));
                TILE_DOT_BYTES(0, 4, 6);
                TILE_DOT_BYTES(1, 4, 7);
                TILE_ZERO(4);  // immediately after use; tiles/product.h gives the reason
                if (both) {
                    TILE_LOAD(5, lower + k, sizeof(Lot));
                    TILE_DOT_BYTES(2, 5, 6);
                    TILE_DOT_BYTES(3, 5, 7);
                    TILE_ZERO(5);
                }
                TILE_ZERO(6);
                TILE_ZERO(7);
            }
            TILE_STORE(0, top, wide);
            TILE_STORE(1, top + 16, wide);
            if (both) {
                TILE_STORE(2, bottom, wide);
                TILE_STORE(3, bottom + 16, wide);
            }
            __asm__ volatile("" ::: "memory");
            if (!p.last) continue;
            const int64_t end = p.rows - t < 32 ? p.rows : t + 32;
            const Floats weights[] = {load(p.weights + g * STRIPE), load(p.weights + g * STRIPE + LANES)};
            for (int64_t i = t; i < end; ++i)
                for (int c = 0; c < 2; ++c) {
                    float* at = p.sums + i * STRIPE + LANES * c;
                    const Floats value = to_floats(load_words(p.partial + i * STRIPE + LANES * c)) * weights[c];
                    store(at, fused(value, all(p.left[i].groups[g].scale), load(at)));
                }
        }
    }
}

#else

constexpr int AT_ONCE_BY_GROUP = 7;  // 28 of 32 registers hold sums: integers of a group, floats of all groups

inline uint32_t word_of(const Lot& row, int64_t at) {
    uint32_t word;
    std::memcpy(&word, row.numbers + OCTETS * at, 4);
    return word;
}

// Multiplies M rows from row `begin` on and prefetches from `next_codes` on, `step` bytes further every OCTETS numbers.
// The product is passed by value, because the compiler would reload a reference after every store.
template <int M> void multiply_octet_rows(const Product p, int64_t begin, const char* next_codes, int64_t step) {
    const Lot* rows = p.left + begin;
    const int64_t count = p.length / OCTETS;
    for (int64_t g = 0; g < p.groups; ++g)
        for (int column = 0; column < STRIPE; column += 16 * ABREAST) {
            const auto partial = [&](int t, int c) { return p.partial + (begin + t) * STRIPE + column + 16 * c; };
            Words sum[M][ABREAST];
#pragma GCC unroll 16
            for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c)
                    sum[t][c] =
                        p.first ? all_words(static_cast<uint32_t>(rows[t].groups[g].start)) : load_words(partial(t, c));
            const uint32_t* words = p.words + g * count * STRIPE + column;
            for (int64_t k = 0; k < count; ++k, words += STRIPE) {
                Words b[ABREAST];
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c) b[c] = load_words(words + 16 * c);
                __builtin_prefetch(next_codes, 0, 2), next_codes += step;
#pragma GCC unroll 16
                for (int t = 0; t < M; ++t) {
                    const uint32_t a = word_of(rows[t], g * count + k);
#pragma GCC unroll 2
                    for (int c = 0; c < ABREAST; ++c) sum[t][c] = dot(sum[t][c], b[c], a);
                }
            }
            if (!p.last) {
#pragma GCC unroll 16
                for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                    for (int c = 0; c < ABREAST; ++c)
                        store_words(reinterpret_cast<uint32_t*>(partial(t, c)), sum[t][c]);
                continue;
            }
            Floats weights[ABREAST];
            for (int c = 0; c < ABREAST; ++c) weights[c] = load(p.weights + g * STRIPE + column + 16 * c);
#pragma GCC unroll 16
            for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
                for (int c = 0; c < ABREAST; ++c) {
                    float* at = p.sums + (begin + t) * STRIPE + column + 16 * c;
                    const Floats scale = all(rows[t].groups[g].scale);
                    store(at, fused(to_floats(sum[t][c]) * weights[c], scale, load(at)));
                }
        }
}

// The same for whole groups, with fewer rows, so that their float sums fit into registers.
template <int M> void multiply_octet_groups(const Product p, int64_t begin, const char* next_codes, int64_t step) {
    const Lot* rows = p.left + begin;
    const int64_t count = p.length / OCTETS;
    const uint32_t* words = p.words;
    Floats total[M][2];
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t)
        for (int c = 0; c < 2; ++c) total[t][c] = load(p.sums + (begin + t) * STRIPE + 16 * c);
    for (int64_t g = 0, at = 0; g < p.groups; ++g) {
        Words sum[M][2];
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t) sum[t][0] = sum[t][1] = all_words(static_cast<uint32_t>(rows[t].groups[g].start));
        for (const int64_t end = at + count; at < end; ++at, words += STRIPE) {
            const Words low = load_words(words), high = load_words(words + 16);
            __builtin_prefetch(next_codes, 0, 2), next_codes += step;
#pragma GCC unroll 16
            for (int t = 0; t < M; ++t) {
                const uint32_t a = word_of(rows[t], at);
                sum[t][0] = dot(sum[t][0], low, a), sum[t][1] = dot(sum[t][1], high, a);
            }
        }
        const Floats low = load(p.weights + g * STRIPE), high = load(p.weights + g * STRIPE + 16);
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t) {
            const Floats scale = all(rows[t].groups[g].scale);
            total[t][0] = fused(to_floats(sum[t][0]) * low, scale, total[t][0]);
            total[t][1] = fused(to_floats(sum[t][1]) * high, scale, total[t][1]);
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t)
        for (int c = 0; c < 2; ++c) store(p.sums + (begin + t) * STRIPE + 16 * c, total[t][c]);
}

using MultiplyOctets = void (*)(const Product, int64_t, const char*, int64_t);
template <int... M> MultiplyOctets pick_octets(Counts<M...>, int rows) {
    static constexpr MultiplyOctets known[] = {multiply_octet_rows<M>...};
    return known[rows - 1];
}
template <int... M> MultiplyOctets pick_octet_groups(Counts<M...>, int rows) {
    static constexpr MultiplyOctets known[] = {multiply_octet_groups<M>...};
    return known[rows - 1];
}

inline void multiply_octets(const Product& p) {
    const bool by_group = ABREAST == 2 && p.groups > 1;
    const int64_t most = by_group ? AT_ONCE_BY_GROUP : AT_ONCE, blocks = (p.rows + most - 1) / most,
                  times = p.groups * p.length / OCTETS, step = (p.next_bytes + times - 1) / times;
    if (blocks == 1 && p.next_codes[1]) fetch(p.next_codes[1], 64, static_cast<int>(p.next_bytes / 64));
    for (int64_t i = 0, begin = 0; i < blocks; ++i) {
        const int64_t end = p.rows * (i + 1) / blocks;
        const int rows = static_cast<int>(end - begin);
        const MultiplyOctets run =
            by_group ? pick_octet_groups(UpTo<AT_ONCE_BY_GROUP>{}, rows) : pick_octets(UpTo<AT_ONCE>{}, rows);
        // the first block of rows prefetches one panel, the second block the other; later blocks touch cached words
        const char* next_codes = i < 2 ? p.next_codes[i] : nullptr;
        run(p, begin, next_codes ? next_codes : reinterpret_cast<const char*>(p.words), next_codes ? step : 0);
        begin = end;
    }
}

#endif

}  // namespace gs::GS_LEVEL
