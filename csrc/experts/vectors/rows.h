// Conversion of rows of the caller's tensors to float operands of products, and back.
#pragma once

#include "../arithmetic/dropout.h"
#include "../grouping.h"
#include "pairs.h"

namespace gs::GS_LEVEL {

// Rows [.., columns], `stride` elements apart, float32 or bfloat16; `shared` neighbouring routes read the same row (the
// `slots` routes of a token).
struct Rows {
    const char* data;
    int64_t columns, stride, shared;
    bool bf16;

    const char* at(int64_t row, int64_t column) const {
        return data + (row / shared * stride + column) * (bf16 ? 2 : 4);
    }
};

inline Rows rows_of(const gs_tensor& t, int64_t columns, int64_t shared) {
    return {static_cast<const char*>(t.data), columns, columns, shared, t.dtype == GS_BF16};
}

// Prefetches `bytes` of a row into L1.
inline void fetch_row(const char* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

inline void read(const char* from, bool bf16, int64_t count, float* to) {
    int64_t i = 0;
    if (bf16) {
        const auto* values = reinterpret_cast<const uint16_t*>(from);
        for (; i + 16 <= count; i += 16) store(to + i, bfloat16s(values + i));
        for (; i < count; ++i) to[i] = bfloat16(values[i]);
    } else {
        std::memcpy(to, from, static_cast<size_t>(count) * 4);
    }
}

// Whether a row has neither Inf nor NaN. There is no early exit, so that the loop is vectorised: one by one it took
// 1/10 of a call of offload's CPU lane with 32 tokens per expert, and 1/5 with 256 (a Xeon with AMX).
inline bool all_finite(const float* row, int64_t count) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, 4);
        bad |= (bits & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    }
    return bad == 0;
}

inline void write(char* to, bool bf16, int64_t count, const float* values) {
    if (bf16) {
        auto* out = reinterpret_cast<uint16_t*>(to);
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) store_bfloat16(out + i, load(values + i));
        for (; i < count; ++i) out[i] = to_bfloat16(values[i]);
    } else {
        std::memcpy(to, values, static_cast<size_t>(count) * 4);
    }
}

// left[i] = columns [begin, end) of row list[i], or of row first + i
inline void gather(const Rows& rows, const int64_t* list, int64_t count, int64_t begin, int64_t end, float* left) {
    for (int64_t i = 0; i < count; ++i) read(rows.at(list[i], begin), rows.bf16, end - begin, left + i * LEFT_STRIDE);
}

inline void gather_run(const Rows& rows, int64_t first, int64_t count, int64_t begin, int64_t end, float* left) {
    for (int64_t i = 0; i < count; ++i) read(rows.at(first + i, begin), rows.bf16, end - begin, left + i * LEFT_STRIDE);
}

// The matrix of one expert in a strided tensor [E, rows, columns].
struct Factor {
    char* data;
    int64_t row, column;  // strides
    bool bf16;

    char* place(int64_t i, int64_t j) const { return data + (i * row + j * column) * (bf16 ? 2 : 4); }
    float at(int64_t i, int64_t j) const {
        const int64_t where = i * row + j * column;
        return bf16 ? bfloat16(reinterpret_cast<const uint16_t*>(data)[where])
                    : reinterpret_cast<const float*>(data)[where];
    }
    void put(int64_t i, int64_t j, float value) const {
        const int64_t where = i * row + j * column;
        if (bf16)
            reinterpret_cast<uint16_t*>(data)[where] = to_bfloat16(value);
        else
            reinterpret_cast<float*>(data)[where] = value;
    }
};

inline Factor factor_of(const gs_tensor& t, int64_t expert) {
    const bool bf16 = t.dtype == GS_BF16;
    return {static_cast<char*>(t.data) + expert * t.strides[0] * (bf16 ? 2 : 4), t.strides[1], t.strides[2], bf16};
}

// The same for a tensor of two dimensions.
inline Factor matrix_of(const gs_tensor& t) {
    return {static_cast<char*>(t.data), t.strides[0], t.strides[1], t.dtype == GS_BF16};
}

inline Factor transposed(Factor f) { return {f.data, f.column, f.row, f.bf16}; }

// The first `count` of sixteen contiguous values, then zeros.
inline Floats read_some(const char* from, bool bf16, int64_t count) {
    if (!bf16) return load_some(reinterpret_cast<const float*>(from), count);
    uint16_t values[LANES] = {};
    std::memcpy(values, from, static_cast<size_t>(count < LANES ? count : LANES) * 2);
    return bfloat16s(values);
}

// factor_stripe for a factor with contiguous columns: transposes 16 x 16 at a time in registers.
inline void turned_stripe(const Factor& factor, int64_t begin, int64_t end, int64_t col, int64_t width, float* stripe,
                          int64_t all) {
    alignas(64) float block[16][16];
    alignas(64) uint32_t turned[16][16];
    for (int64_t i = begin; i < end; i += 16) {
        const int64_t height = end - i < 16 ? end - i : 16;
        for (int64_t j = 0; j < all; j += 16) {
            float* out = stripe + (i - begin) * STRIPE + j;
            if (j >= width) {
                for (int64_t k = 0; k < height; ++k) store(out + k * STRIPE, zero());
                continue;
            }
            for (int64_t k = 0; k < 16; ++k)
                store(block[k], j + k < width ? read_some(factor.place(i, col + j + k), factor.bf16, height) : zero());
            transpose(reinterpret_cast<const char*>(block), 64, turned[0]);
            for (int64_t k = 0; k < height; ++k)
                store(out + k * STRIPE, load(reinterpret_cast<const float*>(turned[k])));
        }
    }
}

// stripe[i - begin][j - col] = factor[i, j], zero beyond `columns`; fills the first `all` columns of the stripe
inline void factor_stripe(const Factor& factor, int64_t begin, int64_t end, int64_t col, int64_t columns, float* stripe,
                          int64_t all = STRIPE) {
    const int64_t width = columns - col < all ? columns - col : all;
    if (factor.row == 1 && factor.column != 1) return turned_stripe(factor, begin, end, col, width, stripe, all);
    for (int64_t i = begin; i < end; ++i, stripe += STRIPE) {
        if (factor.column == 1) {
            read(factor.place(i, col), factor.bf16, width, stripe);
        } else {
            for (int64_t j = 0; j < width; ++j) stripe[j] = factor.at(i, col + j);
        }
        for (int64_t j = width; j < all; ++j) stripe[j] = 0;
    }
}

}  // namespace gs::GS_LEVEL
