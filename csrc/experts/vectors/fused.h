// sums[t][c] += sum_k left[t][k] * W[c, k] for packed weights without scales: the first block of rows decodes words
// while it multiplies, and writes a stripe for the other blocks.
//
// Decoding bfloat16 takes loads, stores and a shift or mask; a product has free slots for all but the latter. Separate
// decoding took 1/10 of the product of 32 rows; fused, a forward is 5 % faster (H 1024, I 512, 64 experts, one thread
// of a Xeon with AMX at level avx512, 23 November 2026). With 4-bit codes it was 8 % slower: decoding them uses the
// ports that multiply, and 24 sums leave no registers for it.
#pragma once

#include "multiply.h"

namespace gs::GS_LEVEL {

#if defined(__AVX512F__)

template <class Code> constexpr bool FUSED = !Code::plain && !Code::scaled;

// low, high: words of outputs 0..15 and 16..31
template <class Code, int M>
void fused_rows(const float* left, const char* low, const char* high, int64_t depth, float* stripe, float* sums,
                Prefetch prefetch) {
    constexpr int e = Code::per_word;
    Floats sum[M][2];
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t) sum[t][0] = sum[t][1] = zero();
    int64_t k = 0;
    const auto multiply_by = [&](Floats first, Floats second) {
        store(stripe, first), store(stripe + 16, second), stripe += STRIPE;
        __builtin_prefetch(prefetch.at, 0, 3);
        prefetch.at += prefetch.step;
#pragma GCC unroll 16
        for (int t = 0; t < M; ++t) {
            const Floats a = all(left[t * LEFT_STRIDE + k]);
            sum[t][0] = fma(a, first, sum[t][0]), sum[t][1] = fma(a, second, sum[t][1]);
        }
        ++k;
    };
    Floats first[e], second[e];
    const auto take_apart = [&] {
        Code::unit(load_words(low), first), Code::unit(load_words(high), second);
        low += 64, high += 64;
    };
    for (const int64_t whole = depth / e * e; k < whole; prefetch.at += prefetch.jump)
        for (const int64_t end = k + prefetch.chunk < whole ? k + prefetch.chunk : whole; k < end;) {
            take_apart();
#pragma GCC unroll 2
            for (int j = 0; j < e; ++j) multiply_by(first[j], second[j]);
        }
    if (k < depth) {
        take_apart();
        for (int j = 0; k < depth; ++j) multiply_by(first[j], second[j]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            float* at = sums + t * STRIPE + 16 * c;
            store(at, load(at) + sum[t][c]);
        }
}

using FusedRows = void (*)(const float*, const char*, const char*, int64_t, float*, float*, Prefetch);
template <class Code, int... M> FusedRows pick_fused(Counts<M...>, int rows) {
    static constexpr FusedRows known[] = {fused_rows<Code, M>...};
    return known[rows - 1];
}

// For 32 outputs from `row` on and inputs [begin, end); a word starts at begin. Fills stripe [end - begin][STRIPE].
template <class Code>
void multiply_fused(const gs_matrix& m, int64_t expert, int64_t row, int64_t begin, int64_t end, const float* left,
                    int64_t rows, float* stripe, float* sums, const Upcoming& ahead) {
    const char* half[2];
    for (int i = 0; i < 2; ++i) half[i] = panel_of(m, expert, row + 16 * i, false).data + begin / Code::per_word * 64;
    const int64_t depth = end - begin, blocks = (rows + AT_ONCE - 1) / AT_ONCE, first = rows / blocks;
    pick_fused<Code>(UpTo<AT_ONCE>{}, static_cast<int>(first))(left, half[0], half[1], depth, stripe, sums,
                                                               ahead.prefetch(0, blocks, depth, stripe));
    multiply_blocks<STRIPE>(left, first, rows, blocks, 1, stripe, depth, sums, ahead);
}

#else

template <class Code> constexpr bool FUSED = false;  // multiply_fused is never called
template <class Code>
void multiply_fused(const gs_matrix&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t, float*, float*,
                    const Upcoming&);

#endif

}  // namespace gs::GS_LEVEL
