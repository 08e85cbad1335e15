// Prefetches the weights of the next product into L1 during the current one, a line every few steps of k. Prefetched
// all at once, they would be more outstanding lines than a core supports; without prefetching, decoding waits for
// memory: with 32 rows per expert that was 26 % of a forward in bf16 and 17 % in int4 (H 1024, I 512, 64 experts, one
// thread of a Xeon with AMX at level avx512_vnni, 22 November 2026). Prefetching only into L2 makes bf16's forward 2 %
// slower.
#pragma once

#include "../arithmetic/weights.h"

namespace gs::GS_LEVEL {

// The addresses that one block of rows prefetches: `step` bytes further every k, and `jump` more after each `chunk` of
// k.
struct Prefetch {
    const char* at;
    int64_t step, jump, chunk;
};

// The addresses of the next weights, in two halves of `runs` runs of `bytes` each, `stride` apart. Null: unknown.
struct Upcoming {
    const char* half[2] = {};
    int64_t runs = 1, bytes = 0, stride = 0;

    // The share of one block of rows: the first four blocks take equal parts of each run. With everything in the first
    // two blocks, bf16's weights exceeded the 16 outstanding lines that a core supports.
    Prefetch prefetch(int64_t block, int64_t blocks, int64_t depth, const void* hot) const {
        const int64_t parts = blocks < 4 ? blocks : 4, part = (bytes + 64 * parts - 1) / (64 * parts) * 64;
        const int64_t begin = block * part, left = bytes - begin, size = left < part ? left : part;
        if (!half[0] || size <= 0) return {static_cast<const char*>(hot), 0, 0, depth};
        const int64_t all = half[1] ? 2 * runs : runs, apart = runs > 1 ? stride : half[1] - half[0];
        const int64_t chunk = depth < all ? 1 : depth / all, step = (size + chunk - 1) / chunk;
        return {half[0] + begin, step, apart - chunk * step, chunk};
    }
};

// Inputs per word.
inline int64_t inputs_of_word(gs_format format) {
    switch (format) {
        case GS_PLAIN_F32:
        case GS_PACKED_F32: return 1;
        case GS_PLAIN_BF16:
        case GS_PACKED_BF16: return 2;
        case GS_INT8:
        case GS_FP8_BLOCK: return 4;
        default: return 8;
    }
}

inline bool packed(const gs_matrix& m) { return m.format != GS_PLAIN_F32 && m.format != GS_PLAIN_BF16; }

// Prefetches the scales of inputs [begin, end) of a panel.
inline void fetch_scales(const gs_matrix& m, const Panel& panel, int64_t begin, int64_t end) {
    if (m.group == 0) return;
    const int64_t wide = m.format == GS_FP8_BLOCK   ? 4
                         : m.scale_dtype == GS_F32  ? 64
                         : m.scale_dtype == GS_E8M0 ? 16
                                                    : 32;
    const int64_t first = begin / m.group * wide, last = ((end - 1) / m.group + 1) * wide;
    fetch(panel.data + m.scales + first, 64, static_cast<int>((last - first + 63) / 64));
    if (m.format == GS_INT4_ASYM) fetch(panel.data + m.zeros + begin / m.group * 8, 64, 1);
}

// The addresses that outputs_stripe will read.
inline Upcoming outputs_ahead(const gs_matrix& m, int64_t expert, int64_t row, int64_t begin, int64_t end) {
    const int64_t e = inputs_of_word(m.format);
    Upcoming ahead;
    for (int i = 0; i < 2 && row + 16 * i < m.rows; ++i) {
        const Panel panel = panel_of(m, expert, row + 16 * i, !packed(m));
        ahead.half[i] = panel.data + (packed(m) ? begin / e * 64 : begin * 4 / e);
        if (packed(m)) fetch_scales(m, panel, begin, end);
    }
    ahead.bytes = packed(m) ? (end - begin + e - 1) / e * 64 : (end - begin) * 4 / e;
    if (!packed(m)) ahead.runs = 16, ahead.stride = m.panel_bytes;
    return ahead;
}

// The weights that inputs_stripes will decode next: as many outputs as possible from `begin` on, inputs from `col` on.
struct Next {
    const gs_matrix* matrix;
    int64_t expert, begin, end, col;
};

// The addresses of these weights.
template <class Code> Upcoming inputs_ahead(const Next& next) {
    if (!next.matrix) return {};
    constexpr int64_t e = Code::per_word;
    const gs_matrix& m = *next.matrix;
    const int64_t begin = next.begin, col = next.col, left = next.end - begin;
    const int64_t panels = ((left < OUTPUTS<Code> ? left : OUTPUTS<Code>)+15) / 16, first = (panels + 1) / 2;
    Upcoming ahead;
    ahead.stride = m.panel_bytes;
    ahead.runs = !Code::plain ? first : 16 * first;
    ahead.bytes = (!Code::plain ? TILE : 64) * (e == 1 ? 2 : 1);
    for (int i = 0; i < 2 && i * first < panels; ++i)
        ahead.half[i] = panel_of(m, next.expert, begin + 16 * i * first, Code::plain).data +
                        (!Code::plain ? col / e * 64 : col * 4 / e);
    for (int64_t i = 0; m.group && i < panels; ++i) {
        const int64_t last = col + 16 * e < m.cols ? col + 16 * e : m.cols;
        fetch_scales(m, panel_of(m, next.expert, begin + 16 * i, false), col, last);
    }
    return ahead;
}

}  // namespace gs::GS_LEVEL
