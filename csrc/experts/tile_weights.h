// Weights as whole tiles. On the right of y = W x a tile has two neighbouring inputs in a word and 16 outputs a row: a
// packed tile of bfloat16 is that already. On the left of dx = W^T dy it has 32 outputs a row and 16 inputs: the words
// of two neighbouring panels with their halves exchanged, so outputs n and n + 16 share a word and nothing is
// transposed. Other formats are decoded to floats and cut into as many bfloat16 as hold them exactly.
#pragma once

#include "tile_product.h"
#include "weights.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

// 32 values of 16 rows each, the upper halves of which are words of two.
struct Cutter {
    __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    __m512 infinite = _mm512_set1_ps(__builtin_inff());

    // The upper 8 bits of a and b, side by side; a and b keep what they leave over (of an infinity, 0: NaN would be
    // new).
    __m512i pair(__m512& a, __m512& b) const {
        const __m512i high_a = _mm512_and_si512(_mm512_castps_si512(a), upper),
                      high_b = _mm512_and_si512(_mm512_castps_si512(b), upper);
        a = rest(a, high_a), b = rest(b, high_b);
        return _mm512_or_si512(_mm512_srli_epi32(high_a, 16), high_b);
    }
    // The same of numbers that are finite, and of those that leave nothing over.
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

// even[i] = the lower halves of the words of a[i] and b[i], odd[i] = the upper ones: of 16 rows each.
inline __m512i lower_halves(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
}
inline __m512i upper_halves(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(a, 16), b);
}

// The 16 outputs of a panel at inputs [32 block, 32 block + 32), zeros beyond the last one.
template <class Code> void panel_floats(const gs_matrix& m, const Panel& panel, int64_t block, __m512* out) {
    constexpr int e = Code::per_word, words = 32 / e, tile_inputs = 16 * e;
    Floats scale = zero(), offset = zero();
    uint32_t scratch[256];
    const uint32_t* tile = nullptr;
    int64_t group = -1;
    for (int word = 0; word < words; ++word) {
        const int64_t k = 32 * block + word * e, at = k % tile_inputs / e;
        if (k >= m.cols) {
            for (int j = 0; j < e; ++j) out[word * e + j] = _mm512_setzero_ps();
            continue;
        }
        if (tile == nullptr || at == 0) tile = tile_by_word<Code>(m, panel, k / tile_inputs, scratch);
        if constexpr (Code::scaled) {
            if (group != k / m.group) {
                group = k / m.group;
                scale = scales_of(m, panel, group);
                if constexpr (Code::zeros) offset = zeros_of(m, panel, group);
            }
        }
        Floats value[e];
        Code::unit(load_words(tile + 16 * at), value);
        for (int j = 0; j < e; ++j) {
            if constexpr (Code::zeros) value[j] = value[j] - offset;
            if constexpr (Code::scaled) value[j] = value[j] * scale;
            out[word * e + j] = k + j < m.cols ? value[j].v : _mm512_setzero_ps();
        }
    }
}

// Rows of `count` words from the floats of row(i, false) and row(i, true), all cuts of them: two tiles further each.
template <int COUNT, class First, class Second>
void cut_rows(const Cutter& cutter, bool finite, int cuts, char* to, const First& first, const Second& second) {
    for (int cut = 0; cut + 1 < cuts; ++cut, to += 2 * TILE_BYTES)
        if (finite)
            for (int i = 0; i < COUNT; ++i) _mm512_store_si512(to + 64 * i, cutter.finite_pair(first(i), second(i)));
        else
            for (int i = 0; i < COUNT; ++i) _mm512_store_si512(to + 64 * i, cutter.pair(first(i), second(i)));
    for (int i = 0; i < COUNT; ++i) _mm512_store_si512(to + 64 * i, cutter.last_pair(first(i), second(i)));
}

// Codes of 4 bits times a scale of 16: a product is infinite only for scales near the largest number there is.
inline bool finite(const gs_matrix& m) {
    return (m.format == GS_INT4 || m.format == GS_INT4_ASYM) && m.scale_dtype != GS_F32;
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

// Tiles for the right: 32 outputs from `row` on, blocks [0, count) of 32 inputs: [block][cut][2].
template <class Code>
void right_tiles(const gs_matrix& m, int64_t expert, int64_t row, int64_t count, int cuts, char* out) {
    const Cutter cutter;
    for (int half = 0; half < 2; ++half) {
        char* to = out + half * TILE_BYTES;
        if (row + 16 * half >= m.rows) {  // sums of what is there are computed and never read
            for (int64_t i = 0; i < count * cuts; ++i, to += 2 * TILE_BYTES) std::memset(to, 0, TILE_BYTES);
            continue;
        }
        const Panel panel = panel_of(m, expert, row + 16 * half, Code::plain);
        const int64_t bytes = bytes_of_block(m, Code::plain);
        for (int64_t block = 0; block < count; ++block) {
            if (bytes != 0 && block % 4 == 0)
                fetch(panel.data + bytes * block + 4096, 64, static_cast<int>(bytes / 16));
            if constexpr (Code::per_word == 2) {
                uint32_t scratch[256];
                std::memcpy(to, tile_by_word<Code>(m, panel, block, scratch), TILE_BYTES);
                to += 2 * TILE_BYTES;
            } else {
                __m512 values[32];
                panel_floats<Code>(m, panel, block, values);
                cut_rows<16>(
                    cutter, finite(m), cuts, to, [&](int j) -> __m512& { return values[2 * j]; },
                    [&](int j) -> __m512& { return values[2 * j + 1]; });
                to += cuts * 2 * TILE_BYTES;
            }
        }
    }
}

// Tiles for the left: inputs [32 block, 32 block + 32), 32 outputs at a time from `from` to `to`: [32 outputs][cut][2].
// What lies `ahead` of that is fetched, at the end the beginning of the next block.
template <class Code>
void left_tiles(const gs_matrix& m, int64_t expert, int64_t block, int64_t from, int64_t to, int64_t ahead, int cuts,
                char* out) {
    const Cutter cutter;
    const int64_t bytes = bytes_of_block(m, Code::plain), count = (m.rows + 31) / 32;
    out += from * cuts * 2 * TILE_BYTES;
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
        }
        if constexpr (Code::per_word == 2) {
            uint32_t scratch[2][256] = {};
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
            __m512 a[32], b[32];
            panel_floats<Code>(m, low, block, a);
            if (two)
                panel_floats<Code>(m, high, block, b);
            else
                for (__m512& value : b) value = _mm512_setzero_ps();
            cut_rows<32>(
                cutter, finite(m), cuts, out, [&](int k) -> __m512& { return a[k]; },
                [&](int k) -> __m512& { return b[k]; });
            out += cuts * 2 * TILE_BYTES;
        }
    }
}

}  // namespace gs::GS_LEVEL

#endif
