// sums[t][c] += sum_k left[t][k] * stripe[k][c]: the loop that takes most of the time.
#pragma once

#include "prefetch.h"

namespace gs::GS_LEVEL {

// Most rows on the left: 136 KiB, which stay in L2 with 128 KiB of stripes. Tiles multiply so fast that reading the
// weights again would cost more than larger rows; their cores have 2 MiB of L2 each.
#if defined(__AMX_BF16__)
constexpr int ROWS = 512;
#else
constexpr int ROWS = 128;
#endif
constexpr int LEFT_STRIDE =
    DEPTH + 16;  // padded so that rows do not map to the same cache sets; a compile-time constant

#if defined(__AVX512F__)
constexpr int AT_ONCE = 12, ABREAST = 2;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int AT_ONCE = 6, ABREAST = 1;  // 12 of 16
#else
constexpr int AT_ONCE = 2, ABREAST = 1;
#endif

// Multiplies M rows with the first COLUMNS columns. Each chain of additions starts at 0 and is added to the sums once:
// shorter chains have smaller rounding errors at the same cost.
template <int M, int COLUMNS>
void multiply_rows(const float* left, const float* stripe, int64_t depth, float* sums, Prefetch prefetch) {
    constexpr int wide = COLUMNS < 16 * ABREAST ? 1 : ABREAST;
    for (int column = 0; column < COLUMNS; column += 16 * wide) {
        Floats sum[M][wide];
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
            for (int c = 0; c < wide; ++c) sum[t][c] = zero();
        const float* right = stripe + column;
        for (int64_t k = 0; k < depth; prefetch.at += prefetch.jump) {
            const int64_t end = k + prefetch.chunk < depth ? k + prefetch.chunk : depth;
            for (; k < end; ++k, right += STRIPE, prefetch.at += prefetch.step) {
                Floats b[wide];
#pragma GCC unroll 2
                for (int c = 0; c < wide; ++c) b[c] = load(right + 16 * c);
                __builtin_prefetch(prefetch.at, 0, 3);
#pragma GCC unroll 16
                for (int t = 0; t < M; ++t) {
                    const Floats a = all(left[t * LEFT_STRIDE + k]);
#pragma GCC unroll 2
                    for (int c = 0; c < wide; ++c) sum[t][c] = fma(a, b[c], sum[t][c]);
                }
            }
        }
        prefetch = {reinterpret_cast<const char*>(stripe), 0, 0, depth};
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
            for (int c = 0; c < wide; ++c) {
                float* at = sums + t * STRIPE + column + 16 * c;
                store(at, load(at) + sum[t][c]);
            }
    }
}

using MultiplyRows = void (*)(const float*, const float*, int64_t, float*, Prefetch);
template <int... M> struct Counts {};
template <int N, int... M> struct UpTo : UpTo<N - 1, N, M...> {};
template <int... M> struct UpTo<0, M...> : Counts<M...> {};
template <int COLUMNS, int... M> MultiplyRows pick(Counts<M...>, int rows) {
    static constexpr MultiplyRows known[] = {multiply_rows<M, COLUMNS>...};
    return known[rows - 1];
}

// Multiplies rows [begin, rows): the blocks after the first `done` of `blocks`, with about equal heights (13 rows
// become 7 and 6, not 12 and 1).
template <int COLUMNS>
void multiply_blocks(const float* left, int64_t begin, int64_t rows, int64_t blocks, int64_t done, const float* stripe,
                     int64_t depth, float* sums, const Upcoming& ahead) {
    for (int64_t i = done; i < blocks; ++i) {
        const int64_t end = rows * (i + 1) / blocks;
        const MultiplyRows run = pick<COLUMNS>(UpTo<AT_ONCE>{}, static_cast<int>(end - begin));
        run(left + begin * LEFT_STRIDE, stripe, depth, sums + begin * STRIPE, ahead.prefetch(i, blocks, depth, stripe));
        begin = end;
    }
}

// left [rows][LEFT_STRIDE], stripe [depth][STRIPE], sums [rows][STRIPE]; computes the first COLUMNS columns of sums
template <int COLUMNS = STRIPE>
void multiply(const float* left, int64_t rows, const float* stripe, int64_t depth, float* sums,
              const Upcoming& ahead = {}) {
    multiply_blocks<COLUMNS>(left, 0, rows, (rows + AT_ONCE - 1) / AT_ONCE, 0, stripe, depth, sums, ahead);
}

}  // namespace gs::GS_LEVEL
