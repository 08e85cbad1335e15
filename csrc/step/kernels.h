// The kernels of a step for one level: each computes a part of one operation in the thread that calls it.
#pragma once

#include "../experts/arithmetic/activation.h"
#include "../experts/vectors/rows.h"
#include "table.h"

namespace gs::GS_LEVEL {

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x.v);
#elif defined(__AVX2__)
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += x.v[i];
    return sum;
#endif
}

inline Floats numbers(const float* p) { return load(p); }
inline Floats numbers(const uint16_t* p) { return bfloat16s(p); }
inline Floats some_numbers(const float* p, int64_t count) { return load_some(p, count); }
inline Floats some_numbers(const uint16_t* p, int64_t count) {
    alignas(64) uint16_t padded[LANES] = {};
    std::memcpy(padded, p, static_cast<size_t>(count) * 2);
    return bfloat16s(padded);
}

inline float at_index(const gs_tensor& t, int64_t i) {
    return t.dtype == GS_BF16 ? bfloat16(static_cast<const uint16_t*>(t.data)[i])
                              : static_cast<const float*>(t.data)[i];
}

// -- y = W x for weights in rows -----------------------------------------------------------------------------------

// Outputs row .. row + OUTPUTS of ROWS_X rows of x. A sum has one vector of partial sums, whatever the two numbers are,
// so a token's result does not depend on how many there are.
template <int OUTPUTS, int ROWS_X, class Number>
inline void dots(const gs_matrix& m, int64_t row, const float* x, int64_t stride, float* y, int64_t y_stride) {
    const Number* weights[OUTPUTS];
    for (int o = 0; o < OUTPUTS; ++o)
        weights[o] = reinterpret_cast<const Number*>(static_cast<const char*>(m.data) + (row + o) * m.panel_bytes);
    Floats sums[OUTPUTS][ROWS_X];
    for (auto& of : sums)
        for (Floats& sum : of) sum = zero();
    int64_t k = 0;
    for (; k + LANES <= m.cols; k += LANES) {
        Floats right[ROWS_X];
        for (int r = 0; r < ROWS_X; ++r) right[r] = load(x + r * stride + k);
        for (int o = 0; o < OUTPUTS; ++o) {
            const Floats w = numbers(weights[o] + k);
            for (int r = 0; r < ROWS_X; ++r) sums[o][r] = fma(w, right[r], sums[o][r]);
        }
    }
    if (k < m.cols)
        for (int o = 0; o < OUTPUTS; ++o) {
            const Floats w = some_numbers(weights[o] + k, m.cols - k);
            for (int r = 0; r < ROWS_X; ++r) sums[o][r] = fma(w, load_some(x + r * stride + k, m.cols - k), sums[o][r]);
        }
    for (int o = 0; o < OUTPUTS; ++o)
        for (int r = 0; r < ROWS_X; ++r) y[r * y_stride + row + o] = sum_of(sums[o][r]);
}

template <class Number, int ROWS_X>
inline void dots_of(const gs_matrix& m, int64_t begin, int64_t end, const float* x, int64_t stride, float* y,
                    int64_t y_stride) {
    constexpr int OUTPUTS = ROWS_X > 2 ? 2 : 4;
    int64_t row = begin;
    for (; row + OUTPUTS <= end; row += OUTPUTS) dots<OUTPUTS, ROWS_X, Number>(m, row, x, stride, y, y_stride);
    for (; row < end; ++row) dots<1, ROWS_X, Number>(m, row, x, stride, y, y_stride);
}

template <class Number>
inline void plain_linear(const gs_matrix& m, int64_t begin, int64_t end, const float* x, int64_t rows, int64_t stride,
                         float* y, int64_t y_stride) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dots_of<Number, 4>(m, begin, end, x + r * stride, stride, y + r * y_stride, y_stride);
    for (; r + 2 <= rows; r += 2) dots_of<Number, 2>(m, begin, end, x + r * stride, stride, y + r * y_stride, y_stride);
    if (r < rows) dots_of<Number, 1>(m, begin, end, x + r * stride, stride, y + r * y_stride, y_stride);
}

// y[r] = W x[r] + bias for outputs [begin, end)
inline void linear(const gs_linear_args& l, int64_t begin, int64_t end, const float* x, int64_t rows, int64_t stride,
                   float* y, int64_t y_stride, bool bf16) {
    if (l.weight.format == GS_PLAIN_BF16)
        plain_linear<uint16_t>(l.weight, begin, end, x, rows, stride, y, y_stride);
    else
        plain_linear<float>(l.weight, begin, end, x, rows, stride, y, y_stride);
    if (l.bias.dtype != GS_NONE)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = begin; i < end; ++i) y[r * y_stride + i] += at_index(l.bias, i);
    if (bf16)
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = begin; i < end; ++i) y[r * y_stride + i] = bfloat16(to_bfloat16(y[r * y_stride + i]));
}

// -- rows ------------------------------------------------------------------------------------------------------------

// y = x / sqrt(mean(x^2) + epsilon) in the model's dtype, times weight, in the same dtype
inline void norm(const float* x, const gs_tensor& weight, int64_t count, float epsilon, float* y, bool bf16) {
    Floats squares = zero();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    if (i < count) squares = fma(load_some(x + i, count - i), load_some(x + i, count - i), squares);
    const float scale = 1 / std::sqrt(sum_of(squares) / static_cast<float>(count) + epsilon);
    for (i = 0; i + LANES <= count; i += LANES) {
        const Floats row = load(x + i) * all(scale);
        const Floats w = weight.dtype == GS_BF16 ? bfloat16s(static_cast<const uint16_t*>(weight.data) + i)
                                                 : load(static_cast<const float*>(weight.data) + i);
        store(y + i, bf16 ? through_bfloat16(w * through_bfloat16(row)) : w * row);
    }
    for (; i < count; ++i) {
        const float row = x[i] * scale, w = at_index(weight, i);
        y[i] = bf16 ? bfloat16(to_bfloat16(w * bfloat16(to_bfloat16(row)))) : w * row;
    }
}

// y += x, rounded to the model's dtype
inline void add(float* y, const float* x, int64_t count, bool bf16) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats sum = load(y + i) + load(x + i);
        store(y + i, bf16 ? through_bfloat16(sum) : sum);
    }
    for (; i < count; ++i) y[i] = bf16 ? bfloat16(to_bfloat16(y[i] + x[i])) : y[i] + x[i];
}

inline void read_row(const gs_tensor& t, int64_t first, int64_t count, float* to) {
    read(static_cast<const char*>(t.data) + first * (t.dtype == GS_BF16 ? 2 : 4), t.dtype == GS_BF16, count, to);
}

inline void write_row(const gs_tensor& t, int64_t first, int64_t count, const float* from) {
    write(static_cast<char*>(t.data) + first * (t.dtype == GS_BF16 ? 2 : 4), t.dtype == GS_BF16, count, from);
}

// -- attention -------------------------------------------------------------------------------------------------------

// The scores of one query for positions [0, count) of keys [count, D], and their maximum.
template <class Number>
inline float scores(const float* query, const Number* keys, int64_t count, int64_t D, float scaling, float* to) {
    float most = -std::numeric_limits<float>::infinity();
    const auto take = [&](int64_t p, Floats sum) {
        to[p] = sum_of(sum) * scaling;
        most = to[p] > most || to[p] != to[p] ? to[p] : most;
    };
    int64_t p = 0;
    for (; p + 4 <= count; p += 4) {
        const Number* row = keys + p * D;
        Floats sums[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < D; i += LANES) {
            const Floats q = load(query + i);
            for (int j = 0; j < 4; ++j) sums[j] = fma(numbers(row + j * D + i), q, sums[j]);
        }
        for (int j = 0; j < 4; ++j) take(p + j, sums[j]);
    }
    for (; p < count; ++p) {
        Floats sum = zero();
        for (int64_t i = 0; i < D; i += LANES) sum = fma(numbers(keys + p * D + i), load(query + i), sum);
        take(p, sum);
    }
    return most;
}

// to[0 .. 16 N) += sum over p of weights[p] * values[p]
template <int N, class Number>
inline void weighted(const float* weights, const Number* values, int64_t count, int64_t D, float* to) {
    Floats sums[N];
    for (int n = 0; n < N; ++n) sums[n] = load(to + n * LANES);
    for (int64_t p = 0; p < count; ++p) {
        const Floats w = all(weights[p]);
        for (int n = 0; n < N; ++n) sums[n] = fma(w, numbers(values + p * D + n * LANES), sums[n]);
    }
    for (int n = 0; n < N; ++n) store(to + n * LANES, sums[n]);
}

// For each of `queries` [D]: the sum of e^(score - most) * value over `count` positions, and these two numbers' row in
// `ends`: [most, sum of e^(score - most)].
template <class Number>
inline void attend_to(const float* queries, int64_t query_count, const Number* keys, const Number* values,
                      int64_t count, int64_t D, float scaling, float* weights, float* out, float* ends) {
    for (int64_t q = 0; q < query_count; ++q) {
        const float most = scores(queries + q * D, keys, count, D, scaling, weights);
        Floats total = zero();
        int64_t p = 0;
        for (; p + LANES <= count; p += LANES) {
            const Floats e = exponential(load(weights + p) - all(most));
            store(weights + p, e);
            total = total + e;
        }
        float sum = sum_of(total);
        if (p < count) {
            alignas(64) float last[LANES];
            store(last, exponential(load_some(weights + p, count - p) - all(most)));
            for (int64_t i = p; i < count; ++i) sum += weights[i] = last[i - p];
        }
        ends[2 * q] = most, ends[2 * q + 1] = sum;
        float* to = out + q * D;
        std::memset(to, 0, static_cast<size_t>(D) * 4);
        int64_t i = 0;
        for (; i + 4 * LANES <= D; i += 4 * LANES) weighted<4>(weights, values + i, count, D, to + i);
        for (; i < D; i += LANES) weighted<1>(weights, values + i, count, D, to + i);
    }
}

inline void attend(const float* queries, int64_t query_count, const void* keys, const void* values, int64_t first,
                   int64_t count, int64_t D, float scaling, float* weights, float* out, float* ends, bool bf16) {
    if (bf16)
        attend_to(queries, query_count, static_cast<const uint16_t*>(keys) + first,
                  static_cast<const uint16_t*>(values) + first, count, D, scaling, weights, out, ends);
    else
        attend_to(queries, query_count, static_cast<const float*>(keys) + first,
                  static_cast<const float*>(values) + first, count, D, scaling, weights, out, ends);
}

inline constexpr StepKernels STEP_KERNELS{linear, norm, add, read_row, write_row, attend};

}  // namespace gs::GS_LEVEL
