// The formats' codes: how a word of sixteen outputs becomes floats without a scale.
#pragma once

#include "simd.h"

namespace gs::GS_LEVEL {

alignas(64) inline constexpr float SIGNED[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
alignas(64) inline constexpr float UNSIGNED[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) inline constexpr float E2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct Float32 {
    static constexpr int per_word = 1;
    static constexpr bool scaled = false, zeros = false, plain = false;
    static void unit(Words w, Floats* out) { out[0] = as_floats(w); }
};

struct Bfloat16 {
    static constexpr int per_word = 2;
    static constexpr bool scaled = false, zeros = false, plain = false;
    static void unit(Words w, Floats* out) {
        out[0] = as_floats(left<16>(w));
        out[1] = as_floats(w & 0xffff0000u);
    }
};

struct Int8 {
    static constexpr int per_word = 4;
    static constexpr bool scaled = true, zeros = false, plain = false;
    static void unit(Words w, Floats* out) {
        out[0] = to_floats(right_signed<24>(left<24>(w)));
        out[1] = to_floats(right_signed<24>(left<16>(w)));
        out[2] = to_floats(right_signed<24>(left<8>(w)));
        out[3] = to_floats(right_signed<24>(w));
    }
};

struct Fp8 {
    static constexpr int per_word = 4;
    static constexpr bool scaled = true, zeros = false, plain = false;
    // The value of the byte in the upper 8 bits. n = -+2^(exponent - 7) (1 + mantissa / 8) is the negated value unless
    // the exponent is 0, for which the value is -2 n -+ 2^-6. Moving the bits to a float32's fields and multiplying by
    // 2^120 would save two instructions, but a processor takes about 150 cycles for a subnormal float32.
    static Floats upper(Words w) {
        const Floats n = as_floats((right_signed<4>(w) & 0x87f00000u) + all_words(0xbc000000u));
        return fma(n, all(-2), at_least(n, 0x1p-6f));
    }
    static void unit(Words w, Floats* out) {
        out[0] = upper(left<24>(w));
        out[1] = upper(left<16>(w));
        out[2] = upper(left<8>(w));
        out[3] = upper(w);
    }
};

template <const float* TABLE, bool ZEROS> struct Nibbles {
    static constexpr int per_word = 8;
    static constexpr bool scaled = true, zeros = ZEROS, plain = false;
    static void unit(Words w, Floats* out) {
        out[0] = look_up(TABLE, w);
        out[1] = look_up(TABLE, right<16>(w));
        out[2] = look_up(TABLE, right<4>(w));
        out[3] = look_up(TABLE, right<20>(w));
        out[4] = look_up(TABLE, right<8>(w));
        out[5] = look_up(TABLE, right<24>(w));
        out[6] = look_up(TABLE, right<12>(w));
        out[7] = look_up(TABLE, right<28>(w));
    }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#define GS_MANTISSAS

// 4-bit whole numbers as floats by their place in a mantissa. A code in bits [SHIFT, SHIFT + 4) under an exponent that
// gives the lowest of them the value 1 is 2^E + code, and a subtraction leaves the code without an error. Level avx2
// has no table of 16 floats in one register: a look-up takes six instructions, this one two. The lower half of a word
// serves in place, below bits that contain all four exponents; a mask selects code and exponent. Decoding of one token
// in int4 takes 0.7 times as long (2 threads of an EPYC, 28 November 2026).
template <bool ZEROS> struct Mantissas {
    static constexpr int per_word = 8;
    static constexpr bool scaled = true, zeros = ZEROS, plain = false;
    struct Parts {
        Words even, odd;  // the lower and the upper halves of words
    };

    static constexpr uint32_t exponent(int shift) { return uint32_t(127 + 23 - shift) << 23; }
    static Words under_exponents(Words w) {
        __m256i all = _mm256_set1_epi32(static_cast<int>(exponent(0) | exponent(4) | exponent(8) | exponent(12)));
        __asm__("" : "+x"(all));
        return {_mm256_blend_epi16(w.a, all, 0xaa), _mm256_blend_epi16(w.b, all, 0xaa)};
    }
    static Parts parts(Words w) {
        const Words raised = ZEROS ? w : flip_bits(w, 0x88888888u);
        return {under_exponents(raised), under_exponents(right<16>(raised))};
    }
    // gcc would read each constant from memory at every use: more loads than the processor can do beside the others.
    template <int J> static Floats at(const Parts& p) {
        constexpr int shift = J / 2 * 4;
        __m256i mask = _mm256_set1_epi32(static_cast<int>(exponent(shift) | 15u << shift));
        __m256 base = _mm256_set1_ps(static_cast<float>(1 << (23 - shift)) + (ZEROS ? 0.0f : 8.0f));
        __asm__("" : "+x"(mask), "+x"(base));
        const Words& w = J % 2 == 0 ? p.even : p.odd;
        return {_mm256_sub_ps(_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)), base),
                _mm256_sub_ps(_mm256_castsi256_ps(_mm256_and_si256(w.b, mask)), base)};
    }
    static void unit(Words w, Floats* out) {
        const Parts p = parts(w);
        out[0] = at<0>(p), out[1] = at<1>(p), out[2] = at<2>(p), out[3] = at<3>(p);
        out[4] = at<4>(p), out[5] = at<5>(p), out[6] = at<6>(p), out[7] = at<7>(p);
    }
};

using Int4 = Mantissas<false>;
using Int4Asym = Mantissas<true>;
#else
using Int4 = Nibbles<SIGNED, false>;
using Int4Asym = Nibbles<UNSIGNED, true>;
#endif
using Mxfp4 = Nibbles<E2M1, false>;
struct PlainFloat32 : Float32 {
    static constexpr bool plain = true;
};
struct PlainBfloat16 : Bfloat16 {
    static constexpr bool plain = true;
};

}  // namespace gs::GS_LEVEL
