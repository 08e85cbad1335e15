// Vectors of sixteen floats on every level: one AVX-512 register, two AVX2 registers, or a plain array.
// Everything is in the namespace GS_LEVEL, which each translation unit defines, so code of one level never links to
// another's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gs::GS_LEVEL {

constexpr int LANES = 16;

inline float bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

struct Floats {
    __m512 v;
};
struct Words {
    __m512i v;
};

inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats all(float a) { return {_mm512_set1_ps(a)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
// the first `count` of sixteen elements, then zeros
inline Floats load_some(const float* p, int64_t count) {
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xffffu), p)};
}
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a if a < b, else b; so NaN in b passes through, as in torch.clamp: pass the argument as b
inline Floats lesser(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats greater(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
// a, or `size` with a's sign if |a| < size
inline Floats at_least(Floats a, float size) {
    constexpr int larger_size_sign_of_first = 0b0011;
    return {_mm512_range_ps(a.v, _mm512_set1_ps(size), larger_size_sign_of_first)};
}
inline Floats where_greater(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), no.v, yes.v)};
}

inline Words load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
template <int N> inline Words right(Words a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> inline Words left(Words a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline Words right_signed(Words a) { return {_mm512_srai_epi32(a.v, N)}; }
inline Words operator&(Words a, uint32_t mask) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(mask)))};
}
inline Words operator|(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Words all_words(uint32_t a) { return {_mm512_set1_epi32(static_cast<int>(a))}; }
inline Floats as_floats(Words a) { return {_mm512_castsi512_ps(a.v)}; }
inline Floats to_floats(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Words to_words(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// table[a & 15] in each lane
inline Floats look_up(const float* table, Words a) { return {_mm512_permutexvar_ps(a.v, _mm512_loadu_ps(table))}; }
inline Words widen16(const uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Words widen8(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Words widen8(uint64_t low, uint64_t high) {
    return {_mm512_cvtepu8_epi32(_mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)))};
}
// the bfloat16 in the upper half of each word, rounded to even; NaN stays NaN
inline __m512i rounded_to_bfloat16(__m512 a) {
    const __m512i bits = _mm512_castps_si512(a),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
}
inline void store_bfloat16(uint16_t* p, Floats a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bfloat16(a.v), 16)));
}
inline Floats through_bfloat16(Floats a) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(rounded_to_bfloat16(a.v), upper))};
}
inline Floats half_floats(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// to[j][i] = word j of row i, with rows `bytes` apart
inline void transpose(const char* from, int64_t bytes, uint32_t* to) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * bytes);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        _mm512_storeu_si512(to + i * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}

#elif defined(__AVX2__)

struct Floats {
    __m256 a, b;
};
struct Words {
    __m256i a, b;
};

inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats all(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats load_some(const float* p, int64_t count) {
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    const __m256i all = _mm256_set1_epi32(static_cast<int>(count));
    return {_mm256_maskload_ps(p, _mm256_cmpgt_epi32(all, low)),
            _mm256_maskload_ps(p + 8, _mm256_cmpgt_epi32(all, high))};
}
inline void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats round(Floats x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
inline Floats lesser(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats greater(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m256 at_least8(__m256 a, float size) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_and_ps(sign, a), _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_set1_ps(size)));
}
inline Floats at_least(Floats x, float size) { return {at_least8(x.a, size), at_least8(x.b, size)}; }
inline Floats where_greater(Floats x, Floats y, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}

inline Words load_words(const void* p) {
    const auto* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
template <int N> inline Words right(Words x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> inline Words left(Words x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline Words right_signed(Words x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
inline Words operator&(Words x, uint32_t mask) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Words operator|(Words x, Words y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Words operator+(Words x, Words y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Words all_words(uint32_t x) {
    const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
    return {v, v};
}
inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Floats to_floats(Words x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Words to_words(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m256 look_up8(__m256 low, __m256 high, __m256i at) {  // bit 3 selects the half of the table
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at),
                            _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}
inline Floats look_up(const float* table, Words x) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    return {look_up8(low, high, x.a), look_up8(low, high, x.b)};
}
inline Words widen16(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
inline Words widen8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline Words widen8(uint64_t low, uint64_t high) {
    return {_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(low))),
            _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(high)))};
}
inline Words flip_bits(Words x, uint32_t bits) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(bits));
    return {_mm256_xor_si256(x.a, m), _mm256_xor_si256(x.b, m)};
}
// the bfloat16 in the upper half of each word, rounded to even; NaN stays NaN
inline __m256i rounded_to_bfloat16(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
inline void store_bfloat16(uint16_t* p, Floats x) {
    const __m256i low = _mm256_srli_epi32(rounded_to_bfloat16(x.a), 16),
                  high = _mm256_srli_epi32(rounded_to_bfloat16(x.b), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline Floats through_bfloat16(Floats x) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const auto cut = [&](__m256 a) { return _mm256_castsi256_ps(_mm256_and_si256(rounded_to_bfloat16(a), upper)); };
    return {cut(x.a), cut(x.b)};
}
inline Floats half_floats(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

#else

struct Floats {
    float v[LANES];
};
struct Words {
    uint32_t v[LANES];
};

#define EACH(result, expression)                           \
    result r;                                              \
    for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
    return r

inline Floats zero() { return {}; }
inline Floats all(float a) { EACH(Floats, a); }
inline Floats load(const float* p) { EACH(Floats, p[i]); }
inline Floats load_some(const float* p, int64_t count) { EACH(Floats, i < count ? p[i] : 0); }
inline void store(float* p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats operator+(Floats a, Floats b) { EACH(Floats, a.v[i] + b.v[i]); }
inline Floats operator-(Floats a, Floats b) { EACH(Floats, a.v[i] - b.v[i]); }
inline Floats operator*(Floats a, Floats b) { EACH(Floats, a.v[i] * b.v[i]); }
inline Floats operator/(Floats a, Floats b) { EACH(Floats, a.v[i] / b.v[i]); }
inline Floats fma(Floats a, Floats b, Floats c) { EACH(Floats, a.v[i] * b.v[i] + c.v[i]); }
inline Floats round(Floats a) { EACH(Floats, std::nearbyint(a.v[i])); }
inline Floats lesser(Floats a, Floats b) { EACH(Floats, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Floats greater(Floats a, Floats b) { EACH(Floats, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Floats at_least(Floats a, float size) {
    EACH(Floats, std::fabs(a.v[i]) < size ? std::copysign(size, a.v[i]) : a.v[i]);
}
inline Floats where_greater(Floats a, Floats b, Floats yes, Floats no) {
    EACH(Floats, a.v[i] > b.v[i] ? yes.v[i] : no.v[i]);
}

inline Words load_words(const void* p) {
    Words r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
template <int N> inline Words right(Words a) { EACH(Words, a.v[i] >> N); }
template <int N> inline Words left(Words a) { EACH(Words, a.v[i] << N); }
template <int N> inline Words right_signed(Words a) {
    EACH(Words, static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> N));
}
inline Words operator&(Words a, uint32_t mask) { EACH(Words, a.v[i] & mask); }
inline Words operator|(Words a, Words b) { EACH(Words, a.v[i] | b.v[i]); }
inline Words operator+(Words a, Words b) { EACH(Words, a.v[i] + b.v[i]); }
inline Words all_words(uint32_t a) { EACH(Words, a); }
inline Floats as_floats(Words a) {
    Floats r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
inline Floats to_floats(Words a) { EACH(Floats, static_cast<float>(static_cast<int32_t>(a.v[i]))); }
inline Words to_words(Floats a) { EACH(Words, static_cast<uint32_t>(static_cast<int32_t>(a.v[i]))); }
inline Floats look_up(const float* table, Words a) { EACH(Floats, table[a.v[i] & 15]); }
inline Words widen16(const uint16_t* p) { EACH(Words, p[i]); }
inline Words widen8(const uint8_t* p) { EACH(Words, p[i]); }
inline Words widen8(uint64_t low, uint64_t high) { EACH(Words, (i < 8 ? low : high) >> 8 * (i % 8) & 255); }
inline void store_bfloat16(uint16_t* p, Floats a) {
    for (int i = 0; i < LANES; ++i) p[i] = to_bfloat16(a.v[i]);
}
inline Floats through_bfloat16(Floats a) {
    for (float& value : a.v) value = bfloat16(to_bfloat16(value));
    return a;
}
inline float half_float(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size =
        exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
        : exponent == 31 ? (mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
                         : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return h >> 15 ? -size : size;
}
inline Floats half_floats(const uint16_t* p) { EACH(Floats, half_float(p[i])); }

#undef EACH

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// transposes 8 x 8 words
inline void transpose8(const char* from, int64_t bytes, uint32_t* to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * bytes));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; ++k) {
            r[i + 2 * k] = _mm256_shuffle_ps(t[i + k], t[i + k + 2], 0x44);
            r[i + 2 * k + 1] = _mm256_shuffle_ps(t[i + k], t[i + k + 2], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(to + i * 16), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * 16), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
inline void transpose(const char* from, int64_t bytes, uint32_t* to) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose8(from + i * bytes + 4 * j, bytes, to + 16 * j + i);
}
#elif !defined(__AVX2__)
inline void transpose(const char* from, int64_t bytes, uint32_t* to) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) std::memcpy(to + j * 16 + i, from + i * bytes + 4 * j, 4);
}
#endif

inline Floats bfloat16s(const uint16_t* p) { return as_floats(left<16>(widen16(p))); }

}  // namespace gs::GS_LEVEL
