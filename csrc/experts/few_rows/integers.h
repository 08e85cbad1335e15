// y = W x for few rows in 8 bits: codes go from memory to registers, and are multiplied there as bytes.
//
// The sum over a group of inputs is an exact integer, so it has the bits of every other order (int8/multiply.h); the
// floats after it are computed in that file's order.
#pragma once

#include "../int8/rows.h"
#include "outputs.h"

namespace gs::GS_LEVEL {

// A row in 8 bits. `numbers` has the order in which the bytes of a word are decoded, with zeros after the last input;
// scale and sum of every group.
struct IntegerLine {
    const int8_t* numbers;
    const float* scales;
    const int32_t* sums;
};

// The order of eight inputs in `numbers`.
template <class Code> constexpr int byte_order(int at) {
    constexpr int nibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    return Code::per_word == 8 ? nibbles[at] : at;
}

// Raises the codes of int4 and int8 to unsigned bytes; int4_asym has them already.
template <class Code> constexpr uint32_t RAISE = Code::per_word == 4 ? 0x80808080u : Code::zeros ? 0 : 0x88888888u;

#if defined(__AVX512F__)

using Register = __m512i;
constexpr int REGISTERS = 1;  // of sixteen outputs
inline Register load_register(const char* at) { return _mm512_loadu_si512(at); }
inline Register repeated(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return _mm512_set1_epi32(word);
}
inline Register none() { return _mm512_setzero_si512(); }
inline Register raised(Register a, uint32_t by) { return _mm512_xor_si512(a, _mm512_set1_epi32(static_cast<int>(by))); }
inline Register low_nibbles(Register a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Register high_nibbles(Register a) { return low_nibbles(_mm512_srli_epi32(a, 4)); }
inline Words words_of(const Register (&a)[1]) { return {a[0]}; }
inline Words minus(Words a, Words b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Words times(Words a, int32_t b) { return {_mm512_mullo_epi32(a.v, _mm512_set1_epi32(b))}; }
#if !defined(__AVX512VNNI__)
inline Register add_halves(Register a, Register b) { return _mm512_add_epi16(a, b); }
inline Register unsigned_by_signed(Register a, Register b) { return _mm512_maddubs_epi16(a, b); }
inline Register add_pairs(Register sum, Register halves) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(halves, _mm512_set1_epi16(1)));
}
inline Register signed_by_signed(Register codes, Register row) {
    const Register turned = _mm512_mask_sub_epi8(row, _mm512_movepi8_mask(codes), none(), row);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(codes), turned);
}
#endif

#elif defined(__AVX2__)

using Register = __m256i;
constexpr int REGISTERS = 2;
inline Register load_register(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline Register repeated(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
}
inline Register none() { return _mm256_setzero_si256(); }
inline Register raised(Register a, uint32_t by) { return _mm256_xor_si256(a, _mm256_set1_epi32(static_cast<int>(by))); }
inline Register low_nibbles(Register a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Register high_nibbles(Register a) { return low_nibbles(_mm256_srli_epi32(a, 4)); }
inline Words words_of(const Register (&a)[2]) { return {a[0], a[1]}; }
inline Words minus(Words x, Words y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Words times(Words x, int32_t y) {
    const __m256i all = _mm256_set1_epi32(y);
    return {_mm256_mullo_epi32(x.a, all), _mm256_mullo_epi32(x.b, all)};
}
inline Register add_halves(Register a, Register b) { return _mm256_add_epi16(a, b); }
inline Register unsigned_by_signed(Register a, Register b) { return _mm256_maddubs_epi16(a, b); }
inline Register add_pairs(Register sum, Register halves) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(halves, _mm256_set1_epi16(1)));
}
inline Register signed_by_signed(Register codes, Register row) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(row, codes));
}

#else

inline Words minus(Words a, Words b) {
    for (int i = 0; i < LANES; ++i) a.v[i] -= b.v[i];
    return a;
}
inline Words times(Words a, int32_t b) {
    for (int i = 0; i < LANES; ++i) a.v[i] *= static_cast<uint32_t>(b);
    return a;
}

#endif

// The sums of M rows over words [begin, end) of a panel; `RAISED`: codes are raised to unsigned ones. ahead(word):
// prefetches.
#if defined(__AVX512VNNI__)

template <class Code> constexpr bool RAISED = true;

inline Register dot_bytes(Register sum, Register codes, Register row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(row));  // int8/words.h says why not the intrinsic
    return sum;
}

template <class Code, int M, class Ahead>
void integer_sums(const char* panel, int64_t begin, int64_t end, const IntegerLine* rows, const Ahead& ahead,
                  Words (&out)[M]) {
    constexpr int e = Code::per_word;
    Register sum[M][2];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) sum[t][0] = sum[t][1] = none();
    for (int64_t word = begin; word < end; ++word) {
        ahead(word);
        const Register codes = raised(load_register(panel + 64 * word), RAISE<Code>);
        if constexpr (e == 4) {
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) sum[t][0] = dot_bytes(sum[t][0], codes, repeated(rows[t].numbers + 4 * word));
        } else {
            const Register low = low_nibbles(codes), high = high_nibbles(codes);
#pragma GCC unroll 4
            for (int t = 0; t < M; ++t) {
                sum[t][0] = dot_bytes(sum[t][0], low, repeated(rows[t].numbers + 8 * word));
                sum[t][1] = dot_bytes(sum[t][1], high, repeated(rows[t].numbers + 8 * word + 4));
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) out[t] = {_mm512_add_epi32(sum[t][0], sum[t][1])};
}

#elif defined(__AVX2__)

template <class Code> constexpr bool RAISED = Code::per_word == 8;

template <class Code, int M, class Ahead>
void integer_sums(const char* panel, int64_t begin, int64_t end, const IntegerLine* rows, const Ahead& ahead,
                  Words (&out)[M]) {
    constexpr int e = Code::per_word, bytes = 64 / REGISTERS;
    // Eight products of pairs fit into 16 bits: each is at most 2 * 15 * 127. Of int8 only one does.
    constexpr int together = e == 8 ? 4 : 1;
    Register sum[M][REGISTERS];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
        for (int r = 0; r < REGISTERS; ++r) sum[t][r] = none();
    const auto step = [&](int64_t word, int64_t count) {
        Register halves[M][REGISTERS];
        for (int64_t i = 0; i < count; ++i) {
            ahead(word + i);
#pragma GCC unroll 2
            for (int r = 0; r < REGISTERS; ++r) {
                const Register loaded = load_register(panel + 64 * (word + i) + bytes * r);
                if constexpr (e == 4) {
#pragma GCC unroll 4
                    for (int t = 0; t < M; ++t)
                        halves[t][r] = signed_by_signed(loaded, repeated(rows[t].numbers + 4 * word));
                } else {
                    const Register codes = raised(loaded, RAISE<Code>);
                    const Register low = low_nibbles(codes), high = high_nibbles(codes);
#pragma GCC unroll 4
                    for (int t = 0; t < M; ++t) {
                        const int8_t* row = rows[t].numbers + 8 * (word + i);
                        const Register two = add_halves(unsigned_by_signed(low, repeated(row)),
                                                        unsigned_by_signed(high, repeated(row + 4)));
                        halves[t][r] = i == 0 ? two : add_halves(halves[t][r], two);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 2
            for (int r = 0; r < REGISTERS; ++r) sum[t][r] = add_pairs(sum[t][r], halves[t][r]);
    };
    int64_t word = begin;
    for (; word + together <= end; word += together) step(word, together);
    if (word < end) step(word, end - word);
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) out[t] = words_of(sum[t]);
}

#else

template <class Code> constexpr bool RAISED = Code::per_word == 8;

template <class Code, int M, class Ahead>
void integer_sums(const char* panel, int64_t begin, int64_t end, const IntegerLine* rows, const Ahead&,
                  Words (&out)[M]) {
    constexpr int e = Code::per_word;
    for (int t = 0; t < M; ++t) out[t] = all_words(0);
    for (int64_t word = begin; word < end; ++word) {
        const Words codes = load_words(panel + 64 * word);
        for (int t = 0; t < M; ++t)
            for (int n = 0; n < LANES; ++n)
                for (int i = 0; i < e; ++i) {
                    const uint32_t code = codes.v[n];
                    const int byte = i % 4;
                    const int32_t value =
                        e == 4 ? static_cast<int8_t>(code >> 8 * byte)
                               : static_cast<int32_t>((code ^ RAISE<Code>) >> (8 * byte + i / 4 * 4) & 15);
                    out[t].v[n] += static_cast<uint32_t>(value * rows[t].numbers[e * word + i]);
                }
    }
}

#endif

// What the sums of a group have too much: the raise of the codes, or their zeros, times the sum of the row.
template <class Code> Words excess(const gs_matrix& m, const Panel& panel, int64_t group, int32_t sum) {
    if constexpr (Code::zeros) return times(to_words(zeros_of(m, panel, group)), sum);
    return all_words(static_cast<uint32_t>((Code::per_word == 4 ? 128 : 8) * sum));
}

// sums[t][0..15] += the 16 outputs of a panel, group by group; prefetches as add_panel does
template <class Code, int M>
void add_integer_panel(const gs_matrix& m, const Panel& panel, const char* next, const IntegerLine* rows, float* sums) {
    const int64_t words = (m.cols + Code::per_word - 1) / Code::per_word;
    const int64_t group = (m.group + Code::per_word - 1) / Code::per_word;
    const int64_t codes_end = 64 * words, distance = codes_end < AHEAD ? codes_end : AHEAD;
    const char *const rest = panel.data + distance, *const later = next + distance - codes_end;
    const auto ahead = [&](int64_t word) {
        __builtin_prefetch((64 * word < codes_end - distance ? rest : later) + 64 * word, 0, 2);
    };
    Floats total[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) total[t] = load(sums + t * STRIPE);
    for (int64_t word = 0, number = 0; word < words; word += group, ++number) {
        if (number % 2 == 0) fetch(next + m.scales + 32 * number, 64, 1);
        Words sum[M];
        integer_sums<Code, M>(panel.data, word, word + group < words ? word + group : words, rows, ahead, sum);
        const Floats scale = scales_of(m, panel, number);
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
            if constexpr (RAISED<Code>) sum[t] = minus(sum[t], excess<Code>(m, panel, number, rows[t].sums[number]));
            total[t] = fused(to_floats(sum[t]) * scale, all(rows[t].scales[number]), total[t]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) store(sums + t * STRIPE, total[t]);
}

// sums[t][j] += (W row t)[row + j], j = 0..31, as add_few does
inline void add_few_integers(const gs_matrix& m, int64_t expert, int64_t row, const IntegerLine* rows, int64_t count,
                             const char* following, float* sums) {
    with_octets(m.format, [&](auto code) {
        using Code = decltype(code);
        for (int half = 0; half < 2 && row + 16 * half < m.rows; ++half) {
            const Panel panel = panel_of(m, expert, row + 16 * half, false);
            const bool last = half == 1 || row + 16 >= m.rows;
            const char* next = !last ? panel.data + m.panel_bytes : following ? following : panel.data;
            in_blocks(count, [&](int64_t begin, auto many) {
                add_integer_panel<Code, decltype(many)::value>(m, panel, next, rows + begin,
                                                               sums + 16 * half + begin * STRIPE);
            });
        }
    });
}

}  // namespace gs::GS_LEVEL
