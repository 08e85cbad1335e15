// Weights as whole tiles. On the right side of y = W x, a tile has two neighbouring inputs per word and 16 outputs per
// row, which is the order of packed bfloat16 tiles. On the left side of dx = W^T dy, it has 32 outputs per row and 16
// inputs: the words of two neighbouring panels with exchanged halves, so that outputs n and n + 16 share a word and
// nothing is transposed. Other formats are decoded to floats and cut into as many bfloat16 terms as represent them
// exactly.
#pragma once

#include "../arithmetic/weights.h"
#include "powers_of_two.h"
#include "product.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

// Cuts floats into bfloat16 terms by truncation, two floats per word.
struct Cutter {
    __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 infinite = _mm512_set1_ps(__builtin_inff());

    // The upper halves of a and b, side by side; a and b keep the remainders (0 for infinity, to avoid NaN).
    __m512i pair(__m512& a, __m512& b) const {
        const __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), upper),
                      high_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
        a = rest(a, high_a), b = rest(b, high_b);
        return _mm512_or_si512(_mm512_srli_epi32(high_a, 16), high_b);
    }
    // The same for finite numbers; last_pair is for numbers without a remainder.
    __m512i finite_pair(__m512& a, __m512& b) const {
        const __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), upper),
                      high_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
        a = _mm512_sub_ps(a, _mm512_castsi512_ps(high_a)), b = _mm512_sub_ps(b, _mm512_castsi512_ps(high_b));
        return _mm512_or_si512(_mm512_srli_epi32(high_a, 16), high_b);
    }
    __m512i last_pair(__m512 a, __m512 b) const {
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                               _mm512_and_si512(_mm512_castps_si512(b), upper));
    }

private:
    __m512 rest(__m512 value, __m512i cut) const {
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(value), infinite, _CMP_NEQ_UQ);
        return _mm512_maskz_sub_ps(finite, value, _mm512_castsi512_ps(cut));
    }
};

// The lower halves, or the upper halves, of the words of a and b, side by side.
inline __m512i lower_halves(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
}
inline __m512i upper_halves(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
}

// Decodes a panel's 16 outputs to floats, input by input; RAW: without scales.
template <class Code, bool RAW = false> class PanelFloats {
public:
    static constexpr int AT_ONCE = Code::per_word < 2 ? 2 : Code::per_word;

    PanelFloats(const gs_matrix& m, const Panel& panel) : m_(m), panel_(panel) {}

    // Decodes inputs [k, k + AT_ONCE), with zeros beyond the last one; k must increase from call to call.
    [[gnu::always_inline]] void take(int64_t k, __m512* out) {
        for (int part = 0; part < AT_ONCE; part += Code::per_word) word(k + part, out + part);
    }

private:
    [[gnu::always_inline]] void word(int64_t k, __m512* out) {
        constexpr int e = Code::per_word, tile_inputs = 16 * e;
        if (k >= m_.cols) {
            for (int j = 0; j < e; ++j) out[j] = _mm512_setzero_ps();
            return;
        }
        const int64_t at = k % tile_inputs / e;
        if (tile_ == nullptr || at == 0) tile_ = tile_by_word<Code>(m_, panel_, k / tile_inputs, scratch_);
        if constexpr (Code::scaled && !RAW) {
            if (k >= group_end_) {
                const int64_t group = k / m_.group;
                group_end_ = (group + 1) * m_.group;
                scale_ = scales_of(m_, panel_, group);
                if constexpr (Code::zeros) offset_ = zeros_of(m_, panel_, group);
            }
        }
        Floats value[e];
        Code::unit(load_words(tile_ + 16 * at), value);
        for (int j = 0; j < e; ++j) {
            if constexpr (Code::zeros) value[j] = value[j] - offset_;
            if constexpr (Code::scaled && !RAW) value[j] = value[j] * scale_;
            out[j] = value[j].v;
        }
        for (int64_t j = m_.cols - k; j < e; ++j) out[j] = _mm512_setzero_ps();
    }

    const gs_matrix& m_;
    const Panel& panel_;
    Floats scale_ = zero(), offset_ = zero();
    int64_t group_end_ = 0;
    const uint32_t* tile_ = nullptr;
    uint32_t scratch_[Code::plain ? 256 : 1];
};

// Writes all cuts of a row of words with two values each; each cut is two tiles further.
template <int CUTS, bool FINITE> inline void cut_row(const Cutter& cutter, __m512 a, __m512 b, char* to) {
    for (int cut = 0; cut + 1 < CUTS; ++cut, to += 2 * TILE_BYTES)
        _mm512_store_si512(to, FINITE ? cutter.finite_pair(a, b) : cutter.pair(a, b));
    _mm512_store_si512(to, cutter.last_pair(a, b));
}

// Whether products are finite: a 4-bit code times a 16-bit scale overflows only for scales near the largest number.
inline bool finite(const gs_matrix& m) {
    return (m.format == GS_INT4 || m.format == GS_INT4_ASYM) && m.scale_dtype != GS_F32;
}

// Calls action<CUTS, FINITE>().
template <class Action> void with_cuts(const gs_matrix& m, int cuts, const Action& action) {
    if (cuts == 1) return action.template operator()<1, false>();
    if (cuts == 3) return action.template operator()<3, false>();
    if (finite(m)) return action.template operator()<2, true>();
    return action.template operator()<2, false>();
}

inline int64_t bytes_of_block(const gs_matrix& m, bool plain) {
    switch (m.format) {
        case GS_INT8:
        case GS_FP8_BLOCK: return 512;
        case GS_INT4:
        case GS_INT4_ASYM:
        case GS_MXFP4: return 256;
        case GS_PACKED_BF16: return 1024;
        case GS_PACKED_F32: return 2048;
        default: return plain ? 0 : 1024;
    }
}

// Makes tiles for the right side: 32 outputs from `row` on, inputs [32 block, 32 block + 32): [cut][2].
template <class Code>
void right_tiles(const gs_matrix& m, int64_t expert, int64_t row, int64_t block, int cuts, char* out) {
    [[maybe_unused]] const Cutter cutter;
    for (int half = 0; half < 2; ++half) {
        char* to = out + half * TILE_BYTES;
        if (row + 16 * half >= m.rows) {  // their sums are computed and never read
            for (int cut = 0; cut < cuts; ++cut) std::memset(to + cut * 2 * TILE_BYTES, 0, TILE_BYTES);
            continue;
        }
        const Panel panel = panel_of(m, expert, row + 16 * half, Code::plain);
        if constexpr (Code::per_word == 2) {
            uint32_t scratch[256];
            std::memcpy(to, tile_by_word<Code>(m, panel, block, scratch), TILE_BYTES);
        } else {
            if constexpr (Code::per_word == 8)
                if (of_powers<Code>(m) && STEP_OF_TILE * (block + 1) <= m.cols &&
                    right_powers<Code>(m, panel, block, to, 2 * TILE_BYTES))
                    continue;
            constexpr int n = PanelFloats<Code>::AT_ONCE;
            PanelFloats<Code> floats(m, panel);
            with_cuts(m, cuts, [&]<int CUTS, bool FINITE>() {
                for (int k = 0; k < 32; k += n) {
                    __m512 values[n];
                    floats.take(32 * block + k, values);
                    for (int j = 0; j < n; j += 2)
                        cut_row<CUTS, FINITE>(cutter, values[j], values[j + 1], to + 32 * (k + j));
                }
            });
        }
    }
}

// Prefetches the scales of input k for two panels.
inline void fetch_scales(const gs_matrix& m, const char* panel, int64_t k) {
    const int64_t group = k / m.group;
    const int64_t bytes = m.format == GS_FP8_BLOCK                              ? 4
                          : m.scale_dtype == GS_F32                             ? 64
                          : m.scale_dtype == GS_BF16 || m.scale_dtype == GS_F16 ? 32
                                                                                : 16;
    fetch(panel + m.scales + group * bytes, m.panel_bytes, 2);
    if (m.format == GS_INT4_ASYM) fetch(panel + m.zeros + group * 8, m.panel_bytes, 2);
}

// Makes tiles for the left side: inputs [32 block, 32 block + 32), blocks of 32 outputs [from, to): [block][cut][2].
// Prefetches the weights `ahead` blocks further, and at the end those of the next block. RAW: codes without scales.
template <class Code, bool RAW = false>
void left_tiles(const gs_matrix& m, int64_t expert, int64_t block, int64_t from, int64_t to, int64_t ahead, int cuts,
                char* out) {
    const Cutter cutter;
    [[maybe_unused]] const bool powers = of_powers<Code>(m);
    const int64_t bytes = bytes_of_block(m, Code::plain), count = (m.rows + 31) / 32;
    for (int64_t i = from; i < to; ++i) {
        const bool two = 32 * i + 16 < m.rows;
        const Panel low = panel_of(m, expert, 32 * i, Code::plain),
                    high = two ? panel_of(m, expert, 32 * i + 16, Code::plain) : low;
        if (bytes != 0) {
            const bool here = i + ahead < count;
            const char* next =
                low.data + (here ? ahead : ahead - count) * 2 * m.panel_bytes + bytes * (here ? block : block + 1);
            fetch(next, 64, static_cast<int>(bytes / 64));
            fetch(next + m.panel_bytes, 64, static_cast<int>(bytes / 64));
            if constexpr (Code::scaled)
                if (here) fetch_scales(m, low.data + ahead * 2 * m.panel_bytes, 32 * block);
        }
        if constexpr (Code::per_word == 2) {
            uint32_t scratch[2][Code::plain ? 256 : 1];
            const uint32_t *a = tile_by_word<Code>(m, low, block, scratch[0]),
                           *b = two ? tile_by_word<Code>(m, high, block, scratch[1]) : nullptr;
            for (int word = 0; word < 16; ++word) {
                const __m512i x = _mm512_loadu_si512(a + 16 * word),
                              y = two ? _mm512_loadu_si512(b + 16 * word) : _mm512_setzero_si512();
                _mm512_store_si512(out + 128 * word, lower_halves(x, y));
                _mm512_store_si512(out + 128 * word + 64, upper_halves(x, y));
            }
            out += 2 * TILE_BYTES;
        } else {
            PanelFloats<Code, RAW> lower(m, low), upper(m, high);
            constexpr int n = PanelFloats<Code, RAW>::AT_ONCE;
            bool done = false;
            if constexpr (Code::per_word == 8)
                done = powers && two && STEP_OF_TILE * (block + 1) <= m.cols &&
                       left_powers<Code>(m, low, high, block, out, 2 * TILE_BYTES);
            if (!done)
                with_cuts(m, cuts, [&]<int CUTS, bool FINITE>() {
                    for (int k = 0; k < 32; k += n) {
                        __m512 a[n], b[n] = {};
                        lower.take(32 * block + k, a);
                        if (two) upper.take(32 * block + k, b);
                        for (int j = 0; j < n; ++j) cut_row<CUTS, FINITE>(cutter, a[j], b[j], out + 64 * (k + j));
                    }
                });
            out += cuts * 2 * TILE_BYTES;
        }
    }
}

}  // namespace gs::GS_LEVEL

#endif
