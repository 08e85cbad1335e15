// Writes the panels of one packed matrix from its row-major codes; experts/packed/layout.py describes the bytes. Bytes
// are only moved, so this is compiled once, for every level.
#include <algorithm>
#include <cstring>

#include "../error.h"

namespace {

constexpr int64_t ROWS = 16, WORDS = 16;  // of a tile
constexpr int64_t LINE = WORDS * 4;       // bytes of a row in a tile

using Tile = uint32_t[ROWS][WORDS];

// The even nibbles in the low half, the odd ones in the high half
uint32_t gathered(uint32_t word) {
    uint32_t even = word & 0x0F0F0F0F, odd = word >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF, odd = (odd | odd >> 4) & 0x00FF00FF;
    even = (even | even >> 8) & 0xFFFF, odd = (odd | odd >> 8) & 0xFFFF;
    return even | odd << 16;
}

void write_tiles(const gs_panel_args& args, int64_t panel, char* out) {
    const int64_t first = panel * ROWS, rows = std::min(ROWS, args.rows - first);
    const auto* codes = static_cast<const char*>(args.codes) + first * args.code_stride;
    alignas(64) Tile in, turned;
    if (rows < ROWS) std::memset(in, 0, sizeof in);
    for (int64_t tile = 0; tile < args.tiles; ++tile) {
        const int64_t size = std::clamp<int64_t>(args.code_bytes - tile * LINE, 0, LINE);
        for (int64_t row = 0; row < rows; ++row) {
            if (size == LINE) {  // a constant size becomes a few vector moves
                std::memcpy(in[row], codes + row * args.code_stride + tile * LINE, LINE);
            } else {
                std::memset(in[row], 0, LINE);
                std::memcpy(in[row], codes + row * args.code_stride + tile * LINE, size_t(size));
            }
        }
        for (int64_t row = 0; row < ROWS; ++row)
            for (int64_t word = 0; word < WORDS; ++word) turned[word][row] = in[row][word];
        if (args.nibbles)
            for (auto& words : turned)
                for (auto& word : words) word = gathered(word);
        std::memcpy(out + tile * ROWS * LINE, turned, sizeof turned);
    }
}

// [groups][16 rows]: element (group, row) of every row that the matrix has, 0 for the others
template <class Element> void write_scales(const gs_panel_args& args, int64_t panel, char* out) {
    const int64_t first = panel * ROWS, rows = std::min(ROWS, args.rows - first);
    const auto* scales = static_cast<const char*>(args.scales) + first * args.scale_stride;
    for (int64_t group = 0; group < args.groups; ++group) {
        Element of_rows[ROWS] = {};
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(&of_rows[row], scales + row * args.scale_stride + group * int64_t(sizeof(Element)),
                        sizeof(Element));
        std::memcpy(out + group * int64_t(sizeof of_rows), of_rows, sizeof of_rows);
    }
}

// [groups][8 bytes]: row b in the low nibble of byte b, row b + 8 in the high one
void write_zeros(const gs_panel_args& args, int64_t panel, char* out) {
    const int64_t first = panel * ROWS, rows = std::min(ROWS, args.rows - first);
    const auto* zeros = static_cast<const uint8_t*>(args.zeros) + first * args.zero_stride;
    for (int64_t group = 0; group < args.groups; ++group) {
        uint8_t of_rows[ROWS] = {};
        for (int64_t row = 0; row < rows; ++row) of_rows[row] = zeros[row * args.zero_stride + group];
        for (int64_t b = 0; b < ROWS / 2; ++b)
            out[group * (ROWS / 2) + b] = char(of_rows[b] | of_rows[b + ROWS / 2] << 4);
    }
}

void check(const gs_panel_args& args) {
    gs::check_size(&args);
    const int64_t scales = args.groups * args.scale_bytes * (args.rows_of_scale > 1 ? 1 : ROWS);
    const int64_t zeros = args.zeros ? args.groups * ROWS / 2 : 0;
    if (args.rows < 1 || args.panels != (args.rows + ROWS - 1) / ROWS || args.tiles * LINE < args.code_bytes ||
        args.scales_at < args.tiles * ROWS * LINE || (args.scales && args.zeros_at < args.scales_at + scales) ||
        args.panel_bytes < args.scales_at || (args.scales && args.panel_bytes < args.zeros_at + zeros))
        gs::fail(GS_INTERNAL, "%lld rows of %lld bytes do not fit %lld panels of %lld bytes with %lld tiles",
                 static_cast<long long>(args.rows), static_cast<long long>(args.code_bytes),
                 static_cast<long long>(args.panels), static_cast<long long>(args.panel_bytes),
                 static_cast<long long>(args.tiles));
    if (args.scales && args.scale_bytes != 1 && args.scale_bytes != 2 && args.scale_bytes != 4)
        gs::fail(GS_INTERNAL, "scales of %lld bytes, expected 1, 2 or 4", static_cast<long long>(args.scale_bytes));
}

}  // namespace

gs_status gs_write_panels(const gs_panel_args* args) {
    return gs::guarded([&] {
        check(*args);
        for (int64_t panel = 0; panel < args->panels; ++panel) {
            char* const out = static_cast<char*>(args->out) + panel * args->panel_bytes;
            write_tiles(*args, panel, out);
            if (!args->scales) continue;
            char* const scales = out + args->scales_at;
            if (args->rows_of_scale > 1)
                std::memcpy(
                    scales,
                    static_cast<const char*>(args->scales) + panel * ROWS / args->rows_of_scale * args->scale_stride,
                    size_t(args->groups * args->scale_bytes));
            else if (args->scale_bytes == 1)
                write_scales<uint8_t>(*args, panel, scales);
            else if (args->scale_bytes == 2)
                write_scales<uint16_t>(*args, panel, scales);
            else
                write_scales<uint32_t>(*args, panel, scales);
            if (args->zeros) write_zeros(*args, panel, out + args->zeros_at);
        }
    });
}
