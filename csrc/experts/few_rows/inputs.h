// dx = d W for so few rows d that reading W dominates. Each input has a vector of sums, with one lane per output of a
// panel; lanes are added at the end.
#pragma once

#include "outputs.h"

namespace gs::GS_LEVEL {

// The rows as floats, one per output of the matrix, padded with zeros to whole panels.
struct FloatLines {
    const float* row[FEW];
};

constexpr int TILE_WORDS = 16;

// sums[t][16 e inputs][16] += d[t] * W for P panels from `row` on, M rows, and the tile of 16 words at `tile`
template <class Code, int M, int P>
void add_tiles(const gs_matrix& m, int64_t expert, int64_t row, int64_t tile, const FloatLines& d, float* sums) {
    constexpr int e = Code::per_word;
    const int64_t first = tile * TILE_WORDS * e, left = m.cols - first;
    const int64_t words = left < TILE_WORDS * e ? (left + e - 1) / e : TILE_WORDS;
    Panel panels[P];
    Floats factor[M][P], offset[P];
    for (int p = 0; p < P; ++p) {
        panels[p] = panel_of(m, expert, row + 16 * p, false);
        for (int t = 0; t < M; ++t) factor[t][p] = load(d.row[t] + row + 16 * p);
        offset[p] = zero();
    }
    int64_t next = first;  // begin of the next group
    for (int64_t word = 0, k = first; word < words; ++word, k += e) {
        if constexpr (Code::scaled) {
            if (k >= next) {
                for (int p = 0; p < P; ++p) {
                    const Floats scale = scales_of(m, panels[p], k / m.group);
                    if constexpr (Code::zeros) offset[p] = zeros_of(m, panels[p], k / m.group);
                    for (int t = 0; t < M; ++t) factor[t][p] = scale * load(d.row[t] + row + 16 * p);
                }
                next = (k / m.group + 1) * m.group;
            }
        }
        Floats sum[M][e];
        float* const to = sums + word * e * LANES;
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 8
            for (int j = 0; j < e; ++j) sum[t][j] = load(to + (t * TILE_WORDS * e + j) * LANES);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const char* at = panels[p].data + TILE * tile + 64 * word;
            __builtin_prefetch(at + P * m.panel_bytes, 0, 3);
            Floats values[e];
            Code::unit(load_words(at), values);
#pragma GCC unroll 8
            for (int j = 0; j < e; ++j) {
                if constexpr (Code::zeros) values[j] = values[j] - offset[p];
#pragma GCC unroll 4
                for (int t = 0; t < M; ++t) sum[t][j] = fma(values[j], factor[t][p], sum[t][j]);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 8
            for (int j = 0; j < e; ++j) store(to + (t * TILE_WORDS * e + j) * LANES, sum[t][j]);
    }
    if constexpr (Code::scaled)
        for (int p = 0; p < P; ++p)
            fetch(panels[p].data + P * m.panel_bytes + m.scales + 32 * (first / m.group), 64, 2);
}

// to[k / 32][k % 32] += the sum of the lanes of vector k, for `inputs` vectors, with stripes ROWS * STRIPE apart.
inline void add_lanes(const float* vectors, int inputs, int64_t stripe, float* to) {
    alignas(64) uint32_t turned[16][16];
    for (int k = 0; k < inputs; k += 16) {
        transpose(reinterpret_cast<const char*>(vectors + k * LANES), 64, turned[0]);
        Floats sum = zero();
        for (int i = 0; i < 16; ++i) sum = sum + as_floats(load_words(turned[i]));
        float* at = to + k / STRIPE * stripe + k % STRIPE;
        store(at, load(at) + sum);
    }
}

template <class Code, int M>
void add_few_tile(const gs_matrix& m, int64_t expert, int64_t tile, const FloatLines& d, int64_t stripe, float* vectors,
                  float* to) {
    constexpr int inputs = TILE_WORDS * Code::per_word, together = M == 1 ? 4 : M == 2 ? 2 : 1;
    for (int i = 0; i < M * inputs; ++i) store(vectors + i * LANES, zero());
    int64_t row = 0;
    for (; row + 16 * together <= m.rows; row += 16 * together)
        add_tiles<Code, M, together>(m, expert, row, tile, d, vectors);
    for (; row < m.rows; row += 16) add_tiles<Code, M, 1>(m, expert, row, tile, d, vectors);
    for (int t = 0; t < M; ++t) add_lanes(vectors + t * inputs * LANES, inputs, stripe, to + t * STRIPE);
}

// to[i][t][c] += sum_n d[t][n] W[n, col + 32 i + c] over all outputs of a packed matrix, for the stripes i of `span`
// inputs, `stripe` floats apart. vectors: FEW * WIDEST * 16 floats of scratch.
inline void add_few_inputs(const gs_matrix& m, int64_t expert, int64_t col, const FloatLines& d, int64_t count,
                           int64_t stripe, float* vectors, float* to) {
    with_code(m.format, [&](auto code) {
        using Code = decltype(code);
        if constexpr (!Code::plain) {
            constexpr int inputs = TILE_WORDS * Code::per_word;
            // with float32 weights a span has two tiles
            for (int64_t part = 0; part < (inputs < STRIPE ? STRIPE / inputs : 1); ++part) {
                const int64_t tile = col / inputs + part;
                float* at = to + part * inputs;
                if (tile * inputs >= m.cols) break;
                switch (count) {
                    case 1: add_few_tile<Code, 1>(m, expert, tile, d, stripe, vectors, at); break;
                    case 2: add_few_tile<Code, 2>(m, expert, tile, d, stripe, vectors, at); break;
#if defined(__AVX512F__)
                    case 3: add_few_tile<Code, 3>(m, expert, tile, d, stripe, vectors, at); break;
                    default: add_few_tile<Code, 4>(m, expert, tile, d, stripe, vectors, at); break;
#endif
                }
            }
        }
    });
}

}  // namespace gs::GS_LEVEL
