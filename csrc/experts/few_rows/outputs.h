// y = W x for so few rows that reading W dominates: codes go from memory to registers and are multiplied there. The sum
// over a group of inputs uses unscaled codes, and the group's scale is multiplied once at its end.
#pragma once

#include <type_traits>

#include "../vectors/rows.h"

namespace gs::GS_LEVEL {

#if defined(__AVX512F__)
constexpr int FEW = 4;  // most rows at once: each has its sums in four chains, which hide the latency of additions
#else
constexpr int FEW = 2;
#endif
constexpr int MOST_FEW = 8;  // most rows; those after the first FEW read a panel from L1
constexpr int CHAINS = 4;
// Distance in bytes of prefetches, which go to L2, because it supports more outstanding lines than L1.
constexpr int64_t AHEAD = 8192;

// The rows as floats, or as words of two neighbouring bfloat16, padded to a whole word of the matrix's codes.
struct Lines {
    const void* row[MOST_FEW];
    bool pairs;
};

// Whether bfloat16 rows are multiplied directly, two inputs at a time: 4-bit codes and bfloat16 weights are exact in
// bfloat16, and decoding to it is cheaper than to floats.
inline bool lines_of_pairs(gs_format format, bool bf16) {
    switch (format) {
        case GS_PLAIN_BF16:
        case GS_PACKED_BF16:
        case GS_INT4:
        case GS_INT4_ASYM:
        case GS_MXFP4: return HAS_PAIRS && bf16;
        default: return false;
    }
}

// Decoding of a word of codes to operands, and multiplication of an operand with a row's inputs.
template <class Code> struct FloatOperands {
    static constexpr int count = Code::per_word;
    using Operand = Floats;
    Floats offset = zero();

    void begin(const gs_matrix& m, const Panel& panel, int64_t group) {
        if constexpr (Code::zeros) offset = zeros_of(m, panel, group);
    }
    void of(const char* words, Floats* out) const {
        Code::unit(load_words(words), out);
        if constexpr (Code::zeros)
            for (int j = 0; j < count; ++j) out[j] = out[j] - offset;
    }
#if defined(GS_MANTISSAS)
    static constexpr bool one_by_one = std::is_same_v<Code, Int4> || std::is_same_v<Code, Int4Asym>;
    // Calls action(j, operand j): with sixteen registers, an operand is decoded when it is needed.
    template <class Action> [[gnu::always_inline]] void each(const char* words, const Action& action) const {
        const auto parts = Code::parts(load_words(words));
        const auto one = [&](auto j) {
            Floats code = Code::template at<decltype(j)::value>(parts);
            if constexpr (Code::zeros) code = code - offset;
            action(decltype(j)::value, code);
        };
        one(std::integral_constant<int, 0>{}), one(std::integral_constant<int, 1>{});
        one(std::integral_constant<int, 2>{}), one(std::integral_constant<int, 3>{});
        one(std::integral_constant<int, 4>{}), one(std::integral_constant<int, 5>{});
        one(std::integral_constant<int, 6>{}), one(std::integral_constant<int, 7>{});
    }
#else
    static constexpr bool one_by_one = false;
#endif
    static Floats add(Floats sum, Floats codes, const void* row, int64_t at) {
        return fma(codes, all(static_cast<const float*>(row)[at]), sum);
    }
};

#if defined(__AVX512BF16__)

// Table of 32 bfloat16 values for 4-bit codes; a lookup gives two inputs for each of sixteen outputs.
template <class Code> constexpr auto table_of() {
    struct Table {
        alignas(64) uint16_t bits[32];
    } table{};
    constexpr uint16_t whole[17] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                    0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180};
    constexpr uint16_t e2m1[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int i = 0; i < 32; ++i) {
        const int n = i & 15;
        if (std::is_same_v<Code, Mxfp4>)
            table.bits[i] = static_cast<uint16_t>(e2m1[n & 7] | (n & 8) << 12);
        else if (Code::zeros)  // code - zero, in -15..15, as five bits
            table.bits[i] = i < 16 ? whole[i] : static_cast<uint16_t>(whole[32 - i] | 0x8000);
        else
            table.bits[i] = n < 8 ? whole[n] : static_cast<uint16_t>(whole[16 - n] | 0x8000);
    }
    return table;
}

template <class Code> struct PairOperands {
    static constexpr int count = Code::per_word / 2;
    using Operand = __m512i;
    __m512i table, offset;

    PairOperands() {
        if constexpr (count == 4) {
            static constexpr auto values = table_of<Code>();
            table = _mm512_load_si512(values.bits);
        }
    }
    void begin(const gs_matrix& m, const Panel& panel, int64_t group) {
        if constexpr (Code::zeros) {
            const __m512i zeros = to_words(zeros_of(m, panel, group)).v;
            offset = _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16));
        }
    }
    void of(const char* words, __m512i* out) const {
        __m512i w = _mm512_loadu_si512(words);
        __asm__("" : "+v"(w));  // otherwise gcc reloads it from memory for every operand
        if constexpr (count == 1) {
            out[0] = w;
        } else {
            const __m512i moved[4] = {w, _mm512_srli_epi32(w, 4), _mm512_srli_epi32(w, 8), _mm512_srli_epi32(w, 12)};
            for (int j = 0; j < 4; ++j) {
                __m512i at = moved[j];
                if constexpr (Code::zeros) at = _mm512_sub_epi16(_mm512_and_si512(at, _mm512_set1_epi16(15)), offset);
                out[j] = _mm512_permutexvar_epi16(at, table);
            }
        }
    }
    static constexpr bool one_by_one = false;
    static Floats add(Floats sum, __m512i codes, const void* row, int64_t at) {
        const __m512i x = _mm512_set1_epi32(static_cast<const int32_t*>(row)[at]);
        return {_mm512_dpbf16_ps(sum.v, (__m512bh)codes, (__m512bh)x)};
    }
};

#endif

// sums[t][0..15] += the 16 outputs of a panel, all inputs. Prefetches the rest of the panel and the begin of `next`,
// the panel that will be read after it: what nobody reads would cost as much of the memory's time as what somebody
// reads.
template <class Code, class Operands, int M>
void add_panel(const gs_matrix& m, const Panel& panel, const char* next, const void* const* rows, float* sums) {
    constexpr int each = Operands::count;                        // operands per word
    constexpr int together = each < CHAINS ? CHAINS / each : 1;  // words whose operands fill all chains
    const int64_t words = (m.cols + Code::per_word - 1) / Code::per_word;
    const int64_t group = Code::scaled ? m.group / Code::per_word + (m.group % Code::per_word != 0) : words;
    const int64_t codes_end = 64 * words, distance = codes_end < AHEAD ? codes_end : AHEAD;
    const char *const rest = panel.data + distance, *const later = next + distance - codes_end;
    Floats total[M];
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) total[t] = zero();
    Operands operands;
    int64_t number = 0;
    for (int64_t word = 0; word < words; ++number) {
        const int64_t end = word + group < words ? word + group : words;
        if constexpr (Code::scaled) {
            operands.begin(m, panel, number);
            if (number % 2 == 0) fetch(next + m.scales + 32 * number, 64, 1);
        }
        Floats sum[M][CHAINS];
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; ++c) sum[t][c] = zero();
        const auto step = [&](auto many) {
            constexpr int n = decltype(many)::value;
            const auto prefetch = [&](int64_t at) {
                __builtin_prefetch((at < codes_end - distance ? rest : later) + at, 0, 2);
            };
            if constexpr (Operands::one_by_one) {
                prefetch(64 * word);
                operands.each(panel.data + 64 * word, [&](int j, auto codes) {
#pragma GCC unroll 4
                    for (int t = 0; t < M; ++t)
                        sum[t][j % CHAINS] = Operands::add(sum[t][j % CHAINS], codes, rows[t], word * each + j);
                });
            } else {
                typename Operands::Operand codes[n * each];
#pragma GCC unroll 4
                for (int i = 0; i < n; ++i) {
                    prefetch(64 * (word + i));
                    operands.of(panel.data + 64 * (word + i), codes + i * each);
                }
#pragma GCC unroll 8
                for (int j = 0; j < n * each; ++j)
#pragma GCC unroll 4
                    for (int t = 0; t < M; ++t)
                        sum[t][j % CHAINS] = Operands::add(sum[t][j % CHAINS], codes[j], rows[t], word * each + j);
            }
            word += n;
        };
        if constexpr (together > 1)
            while (word + together <= end) step(std::integral_constant<int, together>{});
        while (word < end) step(std::integral_constant<int, 1>{});
#pragma GCC unroll 4
        for (int t = 0; t < M; ++t) {
            const Floats all_four = (sum[t][0] + sum[t][1]) + (sum[t][2] + sum[t][3]);
            if constexpr (Code::scaled)
                total[t] = fma(all_four, scales_of(m, panel, number), total[t]);
            else
                total[t] = total[t] + all_four;
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < M; ++t) store(sums + t * STRIPE, load(sums + t * STRIPE) + total[t]);
}

// The same for the caller's row-major weights.
inline Floats plain_floats(const char* row, bool bf16, int64_t at) {
    return bf16 ? bfloat16s(reinterpret_cast<const uint16_t*>(row) + at)
                : load(reinterpret_cast<const float*>(row) + at);
}

inline float total_of(Floats x) {
    alignas(64) float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

// sum_k row[k] line[k], with line in floats
inline float dot_floats(const char* row, bool bf16, const float* line, int64_t count) {
    Floats sum[CHAINS] = {zero(), zero(), zero(), zero()};
    int64_t k = 0;
    for (; k + LANES * CHAINS <= count; k += LANES * CHAINS)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; ++c)
            sum[c] = fma(plain_floats(row, bf16, k + LANES * c), load(line + k + LANES * c), sum[c]);
    for (; k + LANES <= count; k += LANES) sum[0] = fma(plain_floats(row, bf16, k), load(line + k), sum[0]);
    if (k < count) {
        alignas(64) float a[LANES] = {}, b[LANES] = {};
        read(row + k * (bf16 ? 2 : 4), bf16, count - k, a);
        std::memcpy(b, line + k, static_cast<size_t>(count - k) * 4);
        sum[1] = fma(load(a), load(b), sum[1]);
    }
    return total_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

#if defined(__AVX512BF16__)

inline float dot_pairs(const char* row, const char* line, int64_t count) {
    __m512 sum[CHAINS];
    for (__m512& s : sum) s = _mm512_setzero_ps();
    const auto words = [](const char* at, int64_t k) { return (__m512bh)_mm512_loadu_si512(at + 2 * k); };
    int64_t k = 0;
    for (; k + 32 * CHAINS <= count; k += 32 * CHAINS) {
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; ++c)
            sum[c] = _mm512_dpbf16_ps(sum[c], words(row, k + 32 * c), words(line, k + 32 * c));
    }
    for (; k + 32 <= count; k += 32) sum[0] = _mm512_dpbf16_ps(sum[0], words(row, k), words(line, k));
    if (k < count) {
        alignas(64) char a[64] = {}, b[64] = {};
        std::memcpy(a, row + 2 * k, static_cast<size_t>(2 * (count - k)));
        std::memcpy(b, line + 2 * k, static_cast<size_t>(2 * (count - k)));
        sum[1] = _mm512_dpbf16_ps(sum[1], words(a, 0), words(b, 0));
    }
    return total_of({_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]))});
}

#endif

template <class Code>
void add_plain(const gs_matrix& m, const Panel& panel, const Lines& lines, int64_t count, float* sums) {
    constexpr bool bf16 = Code::per_word == 2;
    for (int i = 0; i < panel.rows; ++i) {
        const char* row = panel.data + i * m.panel_bytes;
        for (int64_t t = 0; t < count; ++t) {
            float& sum = sums[t * STRIPE + i];
#if defined(__AVX512BF16__)
            if (bf16 && lines.pairs) {
                sum += dot_pairs(row, static_cast<const char*>(lines.row[t]), m.cols);
                continue;
            }
#endif
            sum += dot_floats(row, bf16, static_cast<const float*>(lines.row[t]), m.cols);
        }
    }
}

// Calls action(begin, M) for blocks of M rows, a constant of at most FEW; 5 rows are 3 and 2.
template <class Action> void in_blocks(int64_t count, const Action& action) {
    const int64_t blocks = (count + FEW - 1) / FEW;
    for (int64_t i = 0, begin = 0; i < blocks; ++i) {
        const int64_t end = count * (i + 1) / blocks;
        switch (end - begin) {
            case 1: action(begin, std::integral_constant<int, 1>{}); break;
            case 2: action(begin, std::integral_constant<int, 2>{}); break;
#if defined(__AVX512F__)
            case 3: action(begin, std::integral_constant<int, 3>{}); break;
            default: action(begin, std::integral_constant<int, 4>{}); break;
#endif
        }
        begin = end;
    }
}

template <class Code, class Operands>
void add_packed(const gs_matrix& m, const Panel& panel, const char* next, const Lines& lines, int64_t count,
                float* sums) {
    in_blocks(count, [&](int64_t begin, auto many) {
        add_panel<Code, Operands, decltype(many)::value>(m, panel, next, lines.row + begin, sums + begin * STRIPE);
    });
}

// The panel of a packed matrix that begins with this row.
inline const char* few_panel(const gs_matrix& m, int64_t expert, int64_t row) {
    return panel_of(m, expert, row, false).data;
}

// Prefetches the first panel that add_few will read into L2: nothing else has prefetched it.
inline void fetch_few(const gs_matrix& m, int64_t expert, int64_t row) {
    if (m.format == GS_PLAIN_F32 || m.format == GS_PLAIN_BF16) return;
    const char* panel = panel_of(m, expert, row, false).data;
    const int64_t codes = m.scales > 0 && m.scales < AHEAD ? m.scales : AHEAD;
    fetch(panel, 64, static_cast<int>(codes / 64));
    if (m.scales > 0) fetch(panel + m.scales, 64, static_cast<int>((m.panel_bytes - m.scales) / 64));
}

// sums[t][j] += (W line of t)[row + j], j = 0..31. following: the panel that will be read after these, or null
inline void add_few(const gs_matrix& m, int64_t expert, int64_t row, const Lines& lines, int64_t count,
                    const char* following, float* sums) {
    with_code(m.format, [&](auto code) {
        using Code = decltype(code);
        for (int half = 0; half < 2 && row + 16 * half < m.rows; ++half) {
            const Panel panel = panel_of(m, expert, row + 16 * half, Code::plain);
            const bool last = half == 1 || row + 16 >= m.rows;
            const char* next = !last ? panel.data + m.panel_bytes : following ? following : panel.data;
            float* at = sums + 16 * half;
            if constexpr (Code::plain) {
                add_plain<Code>(m, panel, lines, count, at);
            } else {
#if defined(__AVX512BF16__)
                if constexpr (Code::per_word == 2 || Code::per_word == 8) {
                    if (lines.pairs) {
                        add_packed<Code, PairOperands<Code>>(m, panel, next, lines, count, at);
                        continue;
                    }
                }
#endif
                add_packed<Code, FloatOperands<Code>>(m, panel, next, lines, count, at);
            }
        }
    });
}

}  // namespace gs::GS_LEVEL
