// Codes as 8- or 16-bit integers, several per word: the operands of integer product instructions. A word holds
// neighbouring inputs of one output; sixteen outputs are side by side.
#pragma once

#include "../arithmetic/weights.h"

namespace gs::GS_LEVEL {

// OCTETS numbers per word: four of 8 bits if there is an instruction for them, else two of 16 bits, whose products are
// added without saturation. One operand of VNNI is unsigned: weights are raised by BIAS, and BIAS times the sum of the
// row is subtracted again.
#if defined(__AVX512VNNI__)
using Octet = int8_t;
constexpr int OCTETS = 4;
#else
using Octet = int16_t;
constexpr int OCTETS = 2;
#endif

#if defined(__AMX_INT8__)
constexpr bool LIFTED = false;
constexpr int64_t UNIT = 64;  // inputs of a tile; groups are padded with zeros to a multiple of it
#else
constexpr bool LIFTED = OCTETS == 4;
constexpr int64_t UNIT = 8;
#endif

template <class Code> constexpr int32_t BIAS = !LIFTED ? 0 : Code::per_word == 4 ? 128 : Code::zeros ? 15 : 8;

// The order in which the codes of eight inputs are decoded from their words.
template <class Code> constexpr int order_of(int at) {
    constexpr int bytes[2][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 4, 1, 5, 2, 6, 3, 7}};
    constexpr int halves[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    return bytes[Code::per_word == 8][OCTETS == 4 ? at : halves[at]];
}

#if defined(__AVX512F__)

inline Words flip(Words a, uint32_t bits) { return {_mm512_xor_si512(a.v, _mm512_set1_epi32(static_cast<int>(bits)))}; }
inline Words less_bytes(Words a, Words b) { return {_mm512_sub_epi8(a.v, b.v)}; }
inline void store_words(uint32_t* to, Words a) { _mm512_storeu_si512(to, a.v); }
// bytes 0 and 2 of every word, or bytes 1 and 3, as two 16-bit numbers
inline Words even_bytes(Words a) { return {_mm512_srai_epi16(_mm512_slli_epi16(a.v, 8), 8)}; }
inline Words odd_bytes(Words a) { return {_mm512_srai_epi16(a.v, 8)}; }
inline Words greater(Words a, Words b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline Words as_words(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline int32_t greatest(Words a) { return _mm512_reduce_max_epi32(a.v); }
inline int32_t total(Words a) { return _mm512_reduce_add_epi32(a.v); }
inline Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
#if defined(__AVX512VNNI__)
// Inline assembly, because with the intrinsic gcc 12 copies each sum, some to the stack, and products by group take 1/6
// longer (390 instead of 450 GOP/s with groups of 32, operands in L1; a Xeon with AMX, one thread).
inline Words dot(Words sum, Words weights, uint32_t row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(_mm512_set1_epi32(static_cast<int>(row))));
    return sum;
}
#else
inline Words dot(Words sum, Words weights, uint32_t row) {
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(weights.v, _mm512_set1_epi32(static_cast<int>(row))))};
}
#endif

#elif defined(__AVX2__)

inline Words flip(Words x, uint32_t bits) { return flip_bits(x, bits); }
inline Words less_bytes(Words x, Words y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
inline void store_words(uint32_t* to, Words x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, x.b);
}
inline Words even_bytes(Words x) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
}
inline Words odd_bytes(Words x) { return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)}; }
inline Words greater(Words x, Words y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline Words as_words(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
inline Words dot(Words sum, Words weights, uint32_t row) {
    const __m256i r = _mm256_set1_epi32(static_cast<int>(row));
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(weights.a, r)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(weights.b, r))};
}

#else

#define EACH(expression)                                   \
    Words r;                                               \
    for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
    return r

inline uint32_t half(int number) { return static_cast<uint16_t>(static_cast<int16_t>(number)); }
inline int signed_byte(uint32_t word, int at) { return static_cast<int8_t>(word >> 8 * at); }

inline Words flip(Words a, uint32_t bits) { EACH(a.v[i] ^ bits); }
inline uint32_t less_byte(uint32_t a, uint32_t b, int at) { return (((a >> 8 * at) - (b >> 8 * at)) & 255) << 8 * at; }
inline Words less_bytes(Words a, Words b) {
    EACH(less_byte(a.v[i], b.v[i], 0) | less_byte(a.v[i], b.v[i], 1) | less_byte(a.v[i], b.v[i], 2) |
         less_byte(a.v[i], b.v[i], 3));
}
inline void store_words(uint32_t* to, Words a) { std::memcpy(to, a.v, sizeof a.v); }
inline Words even_bytes(Words a) { EACH(half(signed_byte(a.v[i], 0)) | half(signed_byte(a.v[i], 2)) << 16); }
inline Words odd_bytes(Words a) { EACH(half(signed_byte(a.v[i], 1)) | half(signed_byte(a.v[i], 3)) << 16); }
inline Words greater(Words a, Words b) {
    EACH(static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i]);
}
inline Words as_words(Floats a) {
    Words r;
    std::memcpy(r.v, a.v, sizeof r.v);
    return r;
}
// Rounded once, as on the other levels.
inline Floats fused(Floats a, Floats b, Floats c) {
    for (int i = 0; i < LANES; ++i) c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return c;
}
inline int product(uint32_t a, uint32_t b) { return static_cast<int16_t>(a) * static_cast<int16_t>(b); }
inline Words dot(Words sum, Words weights, uint32_t row) {
    EACH(sum.v[i] + static_cast<uint32_t>(product(weights.v[i], row)) +
         static_cast<uint32_t>(product(weights.v[i] >> 16, row >> 16)));
}

#undef EACH

#endif

#if !defined(__AVX512F__)
inline int32_t greatest(Words a) {
    int32_t lanes[LANES];
    store_words(reinterpret_cast<uint32_t*>(lanes), a);
    int32_t most = lanes[0];
    for (int32_t lane : lanes)
        if (lane > most) most = lane;
    return most;
}
inline int32_t total(Words a) {
    int32_t lanes[LANES], sum = 0;
    store_words(reinterpret_cast<uint32_t*>(lanes), a);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}
#endif

// Stores sixteen numbers of a row in the order in which the matching codes are decoded.
template <class Code> void store_numbers(Octet* to, Words numbers) {
#if defined(__AVX512VNNI__)
    __m128i bytes = _mm512_cvtsepi32_epi8(numbers.v);
    if constexpr (Code::per_word == 8)
        bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
    uint32_t lanes[LANES];
    store_words(lanes, numbers);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) to[i] = static_cast<Octet>(lanes[i / 8 * 8 + order_of<Code>(i % 8)]);
#endif
}

// The offset to subtract from codes: the zeros for int4_asym, and 8 for int4 after flipping the sign bit.
template <class Code> Words offset_of(const gs_matrix& m, const Panel& panel, int64_t group) {
    constexpr uint32_t every = 0x01010101;
    if constexpr (!Code::zeros) return all_words(8 * every);
    const Words one = to_words(zeros_of(m, panel, group)), two = one | left<8>(one), zero = two | left<16>(two);
    return LIFTED ? less_bytes(zero, all_words(BIAS<Code> * every)) : zero;
}

// Decodes one packed word of 16 outputs to 4 / OCTETS or 8 / OCTETS words, STRIPE apart.
template <class Code> void spread(Words packed, Words offset, uint32_t* to) {
    constexpr int count = Code::per_word / 4;
    Words bytes[count];
    if constexpr (count == 1) {
        bytes[0] = LIFTED ? flip(packed, 0x80808080u) : packed;
    } else {
        const Words codes = Code::zeros ? packed : flip(packed, 0x88888888u);
        bytes[0] = codes & 0x0f0f0f0fu;
        bytes[1] = right<4>(codes) & 0x0f0f0f0fu;
        if constexpr (Code::zeros || !LIFTED)
            for (Words& b : bytes) b = less_bytes(b, offset);
    }
    for (const Words& b : bytes) {
        if constexpr (OCTETS == 4) {
            store_words(to, b), to += STRIPE;
        } else {
            store_words(to, even_bytes(b)), store_words(to + STRIPE, odd_bytes(b)), to += 2 * STRIPE;
        }
    }
}

}  // namespace gs::GS_LEVEL
