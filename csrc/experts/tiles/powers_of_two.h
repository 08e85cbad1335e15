// Decodes 4-bit codes times their scales to tiles without multiplication. An integer in -8 .. 7 is a sum of two powers
// of two, and a power of two times a bfloat16 scale only changes the scale's exponent and sign: two tiles represent a
// weight exactly. E2M1 times a power of two needs one tile.
#pragma once

#include <bit>
#include <type_traits>

#include "../arithmetic/weights.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct PowerTables {
    static constexpr uint16_t NOTHING = 1;  // the lowest bit is in neither exponent nor sign
    // addends to a scale's bits, the same for both values of the index's fifth bit
    alignas(64) uint16_t first[32] = {}, second[32] = {};
    alignas(64) uint16_t e2m1[32] = {};
    constexpr PowerTables() {
        constexpr int parts[8][2] = {{0, 0}, {1, 0}, {2, 0}, {4, -1}, {4, 0}, {4, 1}, {4, 2}, {8, -1}};
        for (int i = 0; i < 32; ++i) {
            const int code = i % 16 < 8 ? i % 16 : i % 16 - 16, size = code < 0 ? -code : code;
            const int sign = code < 0 ? -1 : 1;
            first[i] = addend(size == 8 ? -8 : sign * parts[size][0]);
            second[i] = addend(size == 8 ? 0 : sign * parts[size][1]);
            e2m1[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(E2M1[i % 16]) >> 16);
        }
    }
    static constexpr uint16_t addend(int power) {
        if (power == 0) return NOTHING;
        const int size = power < 0 ? -power : power, exponent = size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0;
        return static_cast<uint16_t>((power < 0 ? 0x8000 : 0) | exponent << 7);
    }
};
inline constexpr PowerTables POWER_TABLES;

template <class Code> bool of_powers(const gs_matrix& m) {
    if constexpr (std::is_same_v<Code, Int4>) return m.scale_dtype == GS_BF16;
    return std::is_same_v<Code, Mxfp4>;
}

// The scale bits of a group for 16 outputs, in the lower halves of words; returns false if a product may not be a
// normal number.
template <class Code> bool power_scales(const gs_matrix& m, const Panel& panel, int64_t group, __m512i& out) {
    const char* scales = panel.data + m.scales;
    __mmask16 normal;
    if constexpr (std::is_same_v<Code, Int4>) {
        out = widen16(reinterpret_cast<const uint16_t*>(scales) + 16 * group).v;
        const __m512i exponent = _mm512_and_si512(out, _mm512_set1_epi32(0x7f80));
        normal = _mm512_cmpge_epi32_mask(exponent, _mm512_set1_epi32(1 << 7)) &
                 _mm512_cmple_epi32_mask(exponent, _mm512_set1_epi32(251 << 7));
    } else {
        const __m512i exponent = widen8(reinterpret_cast<const uint8_t*>(scales) + 16 * group).v;
        normal = _mm512_cmpge_epi32_mask(exponent, _mm512_set1_epi32(2)) &
                 _mm512_cmple_epi32_mask(exponent, _mm512_set1_epi32(252));
        const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(127)), 7);
        out = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff));
    }
    return normal == 0xffff;
}

// Stores the weights whose codes are the lowest four bits of each half of `codes`; for integers, both terms.
template <class Code> void put_powers(__m512i codes, __m512i scales, char* to, int64_t to_second) {
    if constexpr (std::is_same_v<Code, Int4>) {
        const __m512i one = _mm512_set1_epi16(PowerTables::NOTHING),
                      a = _mm512_permutexvar_epi16(codes, _mm512_load_si512(POWER_TABLES.first)),
                      b = _mm512_permutexvar_epi16(codes, _mm512_load_si512(POWER_TABLES.second));
        _mm512_store_si512(to, _mm512_maskz_add_epi16(_mm512_testn_epi16_mask(a, one), a, scales));
        _mm512_store_si512(to + to_second, _mm512_maskz_add_epi16(_mm512_testn_epi16_mask(b, one), b, scales));
    } else {
        const __m512i a = _mm512_permutexvar_epi16(codes, _mm512_load_si512(POWER_TABLES.e2m1));
        const __mmask32 some = _mm512_test_epi16_mask(a, _mm512_set1_epi16(0x7fff));
        _mm512_store_si512(to, _mm512_maskz_add_epi16(some, a, scales));
    }
}

// The words of inputs [32 block, 32 block + 32) of a panel, all inside the matrix.
inline const uint32_t* nibble_words(const Panel& panel, int64_t block) {
    return reinterpret_cast<const uint32_t*>(panel.data + TILE * (block / 4)) + block % 4 * 64;
}

// Makes a tile for the right side, its second term to_second bytes further; false: not possible with powers of two.
template <class Code>
bool right_powers(const gs_matrix& m, const Panel& panel, int64_t block, char* to, int64_t to_second) {
    const uint32_t* words = nibble_words(panel, block);
    __m512i scales = _mm512_setzero_si512();
    for (int64_t word = 0, end = 0; word < 4; ++word, to += 256) {
        if (8 * word >= end) {
            const int64_t k = 32 * block + 8 * word, group = k / m.group;
            if (!power_scales<Code>(m, panel, group, scales)) return false;
            scales = _mm512_or_si512(scales, _mm512_slli_epi32(scales, 16));
            end = (group + 1) * m.group - 32 * block;
        }
        const __m512i w = _mm512_loadu_si512(words + 16 * word);
        put_powers<Code>(w, scales, to, to_second);
        put_powers<Code>(_mm512_srli_epi32(w, 4), scales, to + 64, to_second);
        put_powers<Code>(_mm512_srli_epi32(w, 8), scales, to + 128, to_second);
        put_powers<Code>(_mm512_srli_epi32(w, 12), scales, to + 192, to_second);
    }
    return true;
}

// Makes two tiles for the left side, with 16 inputs each.
template <class Code>
bool left_powers(const gs_matrix& m, const Panel& low, const Panel& high, int64_t block, char* to, int64_t to_second) {
    const uint32_t *a = nibble_words(low, block), *b = nibble_words(high, block);
    __m512i scales = _mm512_setzero_si512();
    for (int64_t word = 0, end = 0; word < 4; ++word) {
        if (8 * word >= end) {
            const int64_t k = 32 * block + 8 * word, group = k / m.group;
            __m512i more;
            if (!power_scales<Code>(m, low, group, scales) || !power_scales<Code>(m, high, group, more)) return false;
            scales = _mm512_or_si512(scales, _mm512_slli_epi32(more, 16));
            end = (group + 1) * m.group - 32 * block;
        }
        const __m512i x = _mm512_loadu_si512(a + 16 * word), y = _mm512_loadu_si512(b + 16 * word),
                      even = _mm512_mask_blend_epi16(0xaaaaaaaau, x, _mm512_slli_epi32(y, 16)),
                      odd = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y);
        const auto both = [&](__m512i first, __m512i second) {
            put_powers<Code>(first, scales, to, to_second);
            put_powers<Code>(second, scales, to + 64, to_second);
            to += 128;
        };
        both(even, odd);
        both(_mm512_srli_epi32(even, 4), _mm512_srli_epi32(odd, 4));
        both(_mm512_srli_epi32(even, 8), _mm512_srli_epi32(odd, 8));
        both(_mm512_srli_epi32(even, 12), _mm512_srli_epi32(odd, 12));
    }
    return true;
}

}  // namespace gs::GS_LEVEL

#endif
