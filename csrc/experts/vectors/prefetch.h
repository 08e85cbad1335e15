// Where the weights of the next product lie. They are fetched into L1 while the present one goes on, a line every few
// steps of k: fetched in one go, more lines are under way than a core can wait for; not fetched, decoding waits for
// memory. With 32 rows an expert it took 26 % of a forward at bf16 and 17 at int4 without (H 1024, I 512, 64 experts,
// one thread of a Xeon with AMX at level avx512_vnni, 22 November 2026); into L2 alone, bf16's forward takes 2 % more.
#pragma once

#include "../arithmetic/weights.h"

namespace gs::GS_LEVEL {

// What one block of rows fetches: `step` bytes further every k, `jump` more after `chunk` of them.
struct Soon {
    const char* at;
    int64_t step, jump, chunk;
};

// In two halves, of `runs` of `bytes` each, `stride` apart, the second half behind the first. Null: nothing is known to
// come.
struct Coming {
    const char* half[2] = {};
    int64_t runs = 1, bytes = 0, stride = 0;

    // Every block of rows (of the first four) takes as many bytes of each run. With all of them in the first two
    // blocks, bf16's weights were more lines under way than the 16 that a core can wait for.
    Soon soon(int64_t block, int64_t blocks, int64_t depth, const void* hot) const {
        const int64_t parts = blocks < 4 ? blocks : 4, part = (bytes + 64 * parts - 1) / (64 * parts) * 64;
        const int64_t begin = block * part, left = bytes - begin, size = left < part ? left : part;
        if (!half[0] || size <= 0) return {static_cast<const char*>(hot), 0, 0, depth};
        const int64_t all = half[1] ? 2 * runs : runs, apart = runs > 1 ? stride : half[1] - half[0];
        const int64_t chunk = depth < all ? 1 : depth / all, step = (size + chunk - 1) / chunk;
        return {half[0] + begin, step, apart - chunk * step, chunk};
    }
};

// Neighbouring inputs of a word.
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

// The scales of inputs [begin, end) of a panel.
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

// What outputs_stripe will read.
inline Coming outputs_ahead(const gs_matrix& m, int64_t expert, int64_t row, int64_t begin, int64_t end) {
    const int64_t e = inputs_of_word(m.format);
    Coming ahead;
    for (int i = 0; i < 2 && row + 16 * i < m.rows; ++i) {
        const Panel panel = panel_of(m, expert, row + 16 * i, !packed(m));
        ahead.half[i] = panel.data + (packed(m) ? begin / e * 64 : begin * 4 / e);
        if (packed(m)) fetch_scales(m, panel, begin, end);
    }
    ahead.bytes = packed(m) ? (end - begin + e - 1) / e * 64 : (end - begin) * 4 / e;
    if (!packed(m)) ahead.runs = 16, ahead.stride = m.panel_bytes;
    return ahead;
}

// Which weights inputs_stripes will take: outputs from `begin` on, as many as it can, inputs from `col` on.
struct Next {
    const gs_matrix* matrix;
    int64_t expert, begin, end, col;
};

// Where they lie.
template <class Code> Coming inputs_ahead(const Next& next) {
    if (!next.matrix) return {};
    constexpr int64_t e = Code::per_word;
    const gs_matrix& m = *next.matrix;
    const int64_t begin = next.begin, col = next.col, left = next.end - begin;
    const int64_t panels = ((left < OUTPUTS<Code> ? left : OUTPUTS<Code>)+15) / 16, first = (panels + 1) / 2;
    Coming ahead;
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
