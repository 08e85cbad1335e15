// bfloat16 rows stored as whole tiles of 16 rows by 32 columns, in the order of the groups: unchanged for the left side
// of a product, or transposed for the right side, with columns n and n + 16 of a row in one word. Missing rows are 0.
#pragma once

#include "../vectors/rows.h"
#include "weights.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct Sheet {
    char* data;
    int64_t blocks;  // consecutive tiles of 16 rows

    char* tile(int64_t group, int64_t block) const { return data + (group * blocks + block) * TILE_BYTES; }
};

// Prefetches lines for writing: a missing line would block all later stores.
inline void fetch_to_write(void* at, int lines) {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<char*>(at) + 64 * i, 1);
}

// The mask of 32 columns from `at` on in a row of `columns`.
inline __mmask32 columns_mask(int64_t at, int64_t columns) {
    const int64_t left = columns - at;
    return left >= 32 ? 0xffffffffu : static_cast<__mmask32>((uint64_t{1} << (left < 0 ? 0 : left)) - 1);
}

// Writes sixteen rows (null: zeros) as the tiles of a group.
inline void fill_tiles(const char* const* rows, int64_t columns, const Sheet& sheet, int64_t group) {
    for (int64_t block = 0; block < sheet.blocks; ++block) {
        const __mmask32 mask = columns_mask(32 * block, columns);
        char* tile = sheet.tile(group, block);
        for (int i = 0; i < 16; ++i) {
            const __m512i row = rows[i] ? _mm512_maskz_loadu_epi16(mask, rows[i] + 64 * block) : _mm512_setzero_si512();
            _mm512_store_si512(tile + 64 * i, row);
        }
    }
}

alignas(64) inline constexpr uint16_t HALVES_APART[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// 32 columns rounded to bfloat16 by the instruction, which flushes float32 values below 2^-126 to 0.
inline __m512i rounded_row(Floats low, Floats high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}
// The same, with columns n and n + 16 in one word.
inline __m512i rounded_apart(Floats low, Floats high) {
    return _mm512_permutexvar_epi16(_mm512_load_si512(HALVES_APART), rounded_row(low, high));
}
// Half of a rounded row as floats.
inline Floats half_row(__m512i row, int half) {
    const __m256i words = half ? _mm512_extracti64x4_epi64(row, 1) : _mm512_castsi512_si256(row);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}

alignas(64) inline constexpr uint16_t HALVES_TOGETHER[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                             1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};

// The same, transposed.
inline void fill_turned(const char* const* rows, int64_t columns, const Sheet& sheet, int64_t group) {
    const __m512i apart = _mm512_load_si512(HALVES_APART);
    alignas(64) uint32_t words[16][16];
    for (int64_t block = 0; block < sheet.blocks; ++block) {
        const __mmask32 mask = columns_mask(32 * block, columns);
        for (int i = 0; i < 16; ++i) {
            const __m512i row = rows[i] ? _mm512_maskz_loadu_epi16(mask, rows[i] + 64 * block) : _mm512_setzero_si512();
            _mm512_store_si512(words[i], _mm512_permutexvar_epi16(apart, row));
        }
        transpose(reinterpret_cast<const char*>(words), 64, reinterpret_cast<uint32_t*>(sheet.tile(group, block)));
    }
}

// Transposes 32 x 32 floats.
inline void turn(const float* from, float* to) {
    for (int i = 0; i < 32; i += 16)
        for (int j = 0; j < 32; j += 16) {
            alignas(64) uint32_t block[16][16];
            transpose(reinterpret_cast<const char*>(from + 32 * i + j), 128, block[0]);
            for (int k = 0; k < 16; ++k) _mm512_storeu_si512(to + 32 * (j + k) + i, _mm512_load_si512(block[k]));
        }
}

// Up to 16 columns of a factor [depth, ranks] from column `first` on and rows [begin, begin + 32), as [column][row].
inline void factor_block(const Factor& factor, int64_t begin, int64_t depth, int64_t first, int64_t ranks,
                         float (*out)[32]) {
    const int64_t rows = depth - begin < 32 ? depth - begin : 32, count = ranks - first < 16 ? ranks - first : 16;
    std::memset(out, 0, 16 * 32 * 4);
    if (factor.row == 1) {
        for (int64_t r = 0; r < count; ++r) read(factor.place(begin, first + r), factor.bf16, rows, out[r]);
    } else if (factor.column == 1) {
        alignas(64) float lines[32][16] = {};
        alignas(64) uint32_t turned[16][16];
        for (int64_t i = 0; i < rows; ++i) read(factor.place(begin + i, first), factor.bf16, count, lines[i]);
        for (int half = 0; half < 2; ++half) {
            transpose(reinterpret_cast<const char*>(lines[16 * half]), 64, turned[0]);
            for (int64_t r = 0; r < count; ++r) std::memcpy(out[r] + 16 * half, turned[r], 64);
        }
    } else {
        for (int64_t r = 0; r < count; ++r)
            for (int64_t i = 0; i < rows; ++i) out[r][i] = factor.at(begin + i, first + r);
    }
}

// These columns as weight tiles [block][cut], two tiles apart, for the right side of a product with untransposed rows.
inline void factor_right(const Factor& factor, int64_t depth, int64_t first, int64_t ranks, int cuts, char* out) {
    alignas(64) float values[16][32];
    alignas(64) uint32_t words[3][16][16];
    const __m512i together = _mm512_load_si512(HALVES_TOGETHER);
    const Cutter cutter;
    for (int64_t k = 0; k < depth; k += 32) {
        factor_block(factor, k, depth, first, ranks, values);
        for (int r = 0; r < 16; ++r) {
            __m512 low = _mm512_load_ps(values[r]), high = _mm512_load_ps(values[r] + 16);
            for (int cut = 0; cut < cuts; ++cut)
                _mm512_store_si512(words[cut][r], _mm512_permutexvar_epi16(together, cutter.pair(low, high)));
        }
        for (int cut = 0; cut < cuts; ++cut, out += 2 * TILE_BYTES)
            transpose(reinterpret_cast<const char*>(words[cut]), 64, reinterpret_cast<uint32_t*>(out));
    }
}

// The same for the left side of a product with transposed rows.
inline void factor_left(const Factor& factor, int64_t depth, int64_t first, int64_t ranks, int cuts, char* out) {
    const Cutter cutter;
    alignas(64) float values[16][32];
    for (int64_t k = 0; k < depth; k += 32, out += cuts * 2 * TILE_BYTES) {
        factor_block(factor, k, depth, first, ranks, values);
        for (int r = 0; r < 16; ++r) {
            __m512 low = _mm512_load_ps(values[r]), high = _mm512_load_ps(values[r] + 16);
            for (int cut = 0; cut < cuts; ++cut)
                _mm512_store_si512(out + cut * 2 * TILE_BYTES + 64 * r, cutter.pair(low, high));
        }
    }
}

}  // namespace gs::GS_LEVEL

#endif
