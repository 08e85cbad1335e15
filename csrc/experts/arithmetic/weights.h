// Decodes weights to stripes of floats: [inputs][32 outputs] for y = W x, [outputs][32 inputs] for dx = dy W.
//
// One copy of the weights serves both directions. A word holds `per_word` neighbouring inputs of one output. A packed
// tile has 16 words for each of 16 outputs, with the outputs side by side, as y = W x needs it. Transposing the words
// puts each output's words side by side, as dx = dy W needs it. The caller's row-major tensors have the transposed
// order. Both directions unpack words with the same few instructions. For dx, inputs then come in the order of their
// positions in the words, and the sums are reordered once at the end.
#pragma once

#include "../../goldsmith.h"
#include "codes.h"

namespace gs::GS_LEVEL {

constexpr int STRIPE = 32;  // columns of a stripe
// Rows of a stripe, a multiple of the inputs of every tile. For AVX-512 products a stripe is 16 KiB: with 32 rows on
// the left that fills 32 of L1's 48 KiB, and decoding a stripe does not wait for lines evicted to L2.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int DEPTH = 128;
#else
constexpr int DEPTH = 256;
#endif
constexpr int TILE = 1024;   // bytes of a tile
constexpr int WIDEST = 128;  // most inputs of a tile, with 4-bit codes

// A panel: sixteen outputs of one expert.
struct Panel {
    const char* data;
    int rows;  // fewer than 16 at the end of a plain matrix; packed matrices are padded
};

inline Panel panel_of(const gs_matrix& m, int64_t expert, int64_t row, bool plain) {
    const char* start = static_cast<const char*>(m.data) + expert * m.expert_bytes;
    const int64_t rows = m.rows - row < 16 ? m.rows - row : 16;
    return {start + (plain ? row : row / 16) * m.panel_bytes, static_cast<int>(rows)};
}

// The scales of a group for a panel's 16 outputs.
inline Floats scales_of(const gs_matrix& m, const Panel& panel, int64_t group) {
    const char* scales = panel.data + m.scales;
    switch (m.scale_dtype) {
        case GS_F32:
            if (m.format == GS_FP8_BLOCK) return all(reinterpret_cast<const float*>(scales)[group]);
            return load(reinterpret_cast<const float*>(scales) + 16 * group);
        case GS_BF16: return bfloat16s(reinterpret_cast<const uint16_t*>(scales) + 16 * group);
        case GS_F16: return half_floats(reinterpret_cast<const uint16_t*>(scales) + 16 * group);
        default: {  // E8M0: the exponent's bits; 2^-127 is a subnormal float32
            const Words exponent = widen8(reinterpret_cast<const uint8_t*>(scales) + 16 * group);
            return where_greater(to_floats(exponent), zero(), as_floats(left<23>(exponent)), all(0x1p-127f));
        }
    }
}

inline Floats zeros_of(const gs_matrix& m, const Panel& panel, int64_t group) {
    uint64_t nibbles;
    std::memcpy(&nibbles, panel.data + m.zeros + 8 * group, 8);
    constexpr uint64_t low = 0x0f0f0f0f0f0f0f0fu;
    return to_floats(widen8(nibbles & low, nibbles >> 4 & low));
}

// Words [first, first + 16) of a plain panel's rows, as [row][word], with zeros outside the matrix.
template <class Code> void plain_block(const gs_matrix& m, const Panel& panel, int64_t first, uint32_t* block) {
    constexpr int element = 4 / Code::per_word;
    const int64_t bytes = m.cols * element - 4 * first;
    std::memset(block, 0, TILE);
    if (bytes <= 0) return;
    for (int i = 0; i < panel.rows; ++i)
        std::memcpy(block + 16 * i, panel.data + i * m.panel_bytes + 4 * first,
                    static_cast<size_t>(bytes < 64 ? bytes : 64));
}

// Whether all 16 x 16 words of tile `at` of a plain panel are inside the matrix.
template <class Code> bool whole(const gs_matrix& m, const Panel& panel, int64_t at) {
    return panel.rows == 16 && m.cols * (4 / Code::per_word) >= 64 * (at + 1);
}

// Tile `at` of a panel as [word][row].
template <class Code>
const uint32_t* tile_by_word(const gs_matrix& m, const Panel& panel, int64_t at, uint32_t* scratch) {
    if constexpr (Code::plain) {
        uint32_t block[256];
        if (whole<Code>(m, panel, at)) {
            transpose(panel.data + 64 * at, m.panel_bytes, scratch);
        } else {
            plain_block<Code>(m, panel, 16 * at, block);
            transpose(reinterpret_cast<const char*>(block), 64, scratch);
        }
        return scratch;
    } else {
        return reinterpret_cast<const uint32_t*>(panel.data + TILE * at);
    }
}

// Sixteen rows of sixteen words, `bytes` apart.
struct Block {
    const char* data;
    int64_t bytes;
    const uint32_t* row(int i) const { return reinterpret_cast<const uint32_t*>(data + i * bytes); }
};

// Tile `at` of a panel as [row][word].
template <class Code> Block tile_by_row(const gs_matrix& m, const Panel& panel, int64_t at, uint32_t* scratch) {
    if constexpr (Code::plain) {
        if (whole<Code>(m, panel, at)) return {panel.data + 64 * at, m.panel_bytes};
        plain_block<Code>(m, panel, 16 * at, scratch);
    } else {
        transpose(panel.data + TILE * at, 64, scratch);
    }
    return {reinterpret_cast<const char*>(scratch), 64};
}

// Prefetches 64 bytes of each row into L2, for the next block of the sum.
inline void fetch(const char* at, int64_t bytes, int rows) {
    for (int i = 0; i < rows; ++i) __builtin_prefetch(at + i * bytes, 0, 2);
}

// stripe[k - begin][n - row] = W[n, k] for 32 outputs from `row` on and inputs [begin, end); a tile starts at begin.
template <class Code>
void outputs_stripe(const gs_matrix& m, int64_t expert, int64_t row, int64_t begin, int64_t end, bool fetched,
                    float* stripe) {
    constexpr int e = Code::per_word;
    for (int half = 0; half < 2; ++half) {
        const int64_t first = row + 16 * half;
        float* out = stripe + 16 * half;
        if (first >= m.rows) {
            for (int64_t k = begin; k < end; ++k) store(out + (k - begin) * STRIPE, zero());
            continue;
        }
        const Panel panel = panel_of(m, expert, first, Code::plain);
        Floats scale = zero(), offset = zero();
        int64_t next = begin;  // begin of the next group
        uint32_t scratch[256];
        for (int64_t tile = begin / (16 * e); tile * 16 * e < end; ++tile) {
            const uint32_t* words = tile_by_word<Code>(m, panel, tile, scratch);
            constexpr int64_t ahead = DEPTH / (16 * e);  // tiles
            if (!fetched)
                fetch(panel.data + (Code::plain ? 64 : TILE) * (tile + ahead), Code::plain ? m.panel_bytes : 64,
                      panel.rows);
            for (int64_t word = 0, k = tile * 16 * e; word < 16 && k < end; ++word, k += e) {
                if constexpr (Code::scaled) {
                    if (k >= next) {
                        scale = scales_of(m, panel, k / m.group);
                        if constexpr (Code::zeros) offset = zeros_of(m, panel, k / m.group);
                        next = (k / m.group + 1) * m.group;
                    }
                }
                Floats value[e];
                Code::unit(load_words(words + 16 * word), value);
                for (int j = 0; j < e; ++j) {
                    if constexpr (Code::zeros) value[j] = value[j] - offset;
                    if constexpr (Code::scaled) value[j] = value[j] * scale;
                    store(out + (k - begin + j) * STRIPE, value[j]);
                }
            }
        }
    }
}

// Number of inputs that inputs_stripes decodes at once.
inline int span(gs_format format) {
    switch (format) {
        case GS_INT8:
        case GS_FP8_BLOCK: return 64;
        case GS_INT4:
        case GS_INT4_ASYM:
        case GS_MXFP4: return 128;
        default: return 32;
    }
}

// values[n][w] = of_group(group of word w) for output n: 16 words of `inputs` inputs each, from input `first` on. A
// group has whole words.
template <class Find>
void by_output(const gs_matrix& m, int64_t first, int inputs, const Find& of_group, float (&values)[16][16]) {
    alignas(64) float words[16][16];
    const int64_t last = (m.cols - 1) / m.group;  // the words after it are padding
    int64_t group = first / m.group, next = (group + 1) * m.group;
    Floats found = of_group(group);
    if (group == last || first + 16 * inputs <= next) {
        store(words[0], found);
        for (int n = 0; n < 16; ++n) store(values[n], all(words[0][n]));
        return;
    }
    for (int w = 0; w < 16; ++w) {
        if (first + w * inputs >= next && group < last) found = of_group(++group), next += m.group;
        store(words[w], found);
    }
    transpose(reinterpret_cast<const char*>(words), 64, reinterpret_cast<uint32_t*>(values));
}

// Most outputs for inputs_stripes: with codes, 32 KiB for all stripes.
template <class Code> constexpr int64_t OUTPUTS = Code::per_word < 4 ? DEPTH : 512 / Code::per_word;

// stripes[c / 32][n - begin][c % 32] = W[n, k] for `span` inputs from `col` on and outputs [begin, end), in the order
// of positions in words: c = 16 j + w is position j of word w, k = col + per_word w + j.
template <class Code>
void inputs_stripes(const gs_matrix& m, int64_t expert, int64_t begin, int64_t end, int64_t col, bool fetched,
                    float* stripes) {
    constexpr int e = Code::per_word, width = 16 * e, tiles = e == 1 ? 2 : 1;
    uint32_t words[256];
    alignas(64) float scale[16][16], offset[16][16];
    for (int64_t row = begin; row < end; row += 16) {
        const Panel panel = panel_of(m, expert, row, Code::plain);
        for (int part = 0; part < tiles; ++part) {
            const int64_t first = col + part * width;
            float* const out = stripes + (row - begin) * STRIPE + 16 * part;
            if (first >= m.cols) {
                for (int n = 0; n < 16; ++n) store(out + n * STRIPE, zero());
                continue;
            }
            if constexpr (Code::scaled)
                by_output(m, first, e, [&](int64_t group) { return scales_of(m, panel, group); }, scale);
            if constexpr (Code::zeros)
                by_output(m, first, e, [&](int64_t group) { return zeros_of(m, panel, group); }, offset);
            const Block block = tile_by_row<Code>(m, panel, first / width, words);
            if (!fetched)
                fetch(panel.data + DEPTH / (Code::plain ? 1 : 16) * m.panel_bytes +
                          (Code::plain ? 64 : TILE) * (first / width),
                      Code::plain ? m.panel_bytes : 64, 16);
            for (int n = 0; n < 16; ++n) {
                Floats value[e];
                Code::unit(load_words(block.row(n)), value);
                for (int j = 0; j < e; ++j) {
                    if constexpr (Code::zeros) value[j] = value[j] - load(offset[n]);
                    if constexpr (Code::scaled) value[j] = value[j] * load(scale[n]);
                    store(out + j / 2 * (OUTPUTS<Code> * STRIPE) + n * STRIPE + 16 * (j % 2), value[j]);
                }
            }
        }
    }
}

// Reorders sums from the column order of inputs_stripes to the order of the inputs: [rows][32], with the next 32
// columns `stripe` floats further.
template <int PER_WORD> void put_in_order(float* sums, int64_t rows, int64_t stripe) {
    constexpr int together = 16 / PER_WORD;  // rows
    alignas(64) float places[16][16], words[16][16];
    for (int64_t row = 0; row < rows; row += together) {
        const int64_t count = rows - row < together ? rows - row : together;
        float* const at = sums + row * STRIPE;
        for (int64_t i = 0; i < count; ++i)
            for (int j = 0; j < PER_WORD; ++j)
                store(places[i * PER_WORD + j], load(at + i * STRIPE + j / 2 * stripe + 16 * (j % 2)));
        transpose(reinterpret_cast<const char*>(places), 64, reinterpret_cast<uint32_t*>(words));
        for (int64_t i = 0; i < count; ++i)
            for (int w = 0; w < 16; ++w) {
                const int c = w * PER_WORD;
                std::memcpy(at + i * STRIPE + c / STRIPE * stripe + c % STRIPE, words[w] + i * PER_WORD, PER_WORD * 4);
            }
    }
}

// Calls action with an object of the format's code type.
template <class Action> void with_code(gs_format format, const Action& action) {
    switch (format) {
        case GS_PLAIN_F32: return action(PlainFloat32{});
        case GS_PLAIN_BF16: return action(PlainBfloat16{});
        case GS_PACKED_F32: return action(Float32{});
        case GS_PACKED_BF16: return action(Bfloat16{});
        case GS_INT8: return action(Int8{});
        case GS_FP8_BLOCK: return action(Fp8{});
        case GS_INT4: return action(Int4{});
        case GS_INT4_ASYM: return action(Int4Asym{});
        default: return action(Mxfp4{});
    }
}

}  // namespace gs::GS_LEVEL
