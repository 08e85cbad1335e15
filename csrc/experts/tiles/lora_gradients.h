// The gradients of LoRA with tiles: out[m, n] = scale * sum over an expert's routes of thin[route, m] rows[route, n].
// Two groups of 16 rows make 32 routes: the halves of their tiles are exchanged, so that a word holds two routes. The
// thin side is cut into three bfloat16 terms, which represent it exactly.
#pragma once

#include "call.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

class TileSums {
public:
    struct Rows {
        Sheet sheet;
        int64_t columns;
        bool turned, inner;
    };
    struct Product {
        const gs_tensor* out;
        const gs_lora* lora;
        const float* thin;  // [places, ranks]
        bool weighed;       // times the route's weight
        Rows rows;
    };

    explicit TileSums(TileCall& call)
        : call_(call),
          thin_(call.arena.each<char>(PAIRS * MOST_CUTS * 2 * TILE_BYTES)),
          rows_(call.arena.each<char>(PAIRS * 2 * TILE_BYTES)),
          total_(call.arena.each<float>(
              32 * 32 * (call.outer_blocks > call.inner_blocks ? call.outer_blocks : call.inner_blocks))) {}

    void give(const Product* products, int64_t count) const {
        parallel_for(count * call_.args.experts, [&](int64_t item, int worker) {
            const Product& p = products[item % count];
            if (!given(*p.out)) return;
            [[maybe_unused]] const Tiles tiles;
            one(p, item / count, worker);
        });
    }

private:
    static constexpr int64_t PAIRS = 8;  // pairs of groups at a time: 256 routes

    void one(const Product& p, int64_t expert, int worker) const {
        const Factor straight = factor_of(*p.out, expert), out = p.rows.turned ? transposed(straight) : straight;
        const int64_t ranks = call_.ranks(*p.lora), blocks = p.rows.sheet.blocks;
        float* const total = total_.data(worker);
        const float scale = static_cast<float>(p.lora->scale);
        if (call_.grouping.expert[expert] == call_.grouping.expert[expert + 1]) {
            clear(straight, p.out->sizes[1], p.out->sizes[2]);
            return;
        }
        for (int64_t first = 0; first < ranks; first += 16) {
            std::memset(total, 0, static_cast<size_t>(blocks) * 4096);
            for (int64_t part = 0; part < call_.parts; ++part)
                if (call_.grouping.parts[part].expert == expert)
                    for (int64_t g = 0; g < call_.groups_of(part); g += 2 * PAIRS)
                        add(p, part, g, first, ranks, total, worker);
            const int64_t height = ranks - first < 16 ? ranks - first : 16;
            for (int64_t block = 0; block < blocks; ++block)
                write_block(p, out, first, height, block, scale, total + 1024 * block);
        }
    }

    // Adds the routes of up to PAIRS pairs of groups of a part.
    void add(const Product& p, int64_t part, int64_t g, int64_t first, int64_t ranks, float* total, int worker) const {
        const int64_t all = call_.groups_of(part) - g < 2 * PAIRS ? call_.groups_of(part) - g : 2 * PAIRS,
                      pairs = (all + 1) / 2, group = call_.groups.data()[part] + g;
        char *const thin = thin_.data(worker), *const rows = rows_.data(worker);
        lay_thin(p, part, g, pairs, first, ranks, thin);
        constexpr int64_t step = MOST_CUTS * 2 * TILE_BYTES;
        const Link on_left{thin, thin, rows, rows + TILE_BYTES, step, 2 * TILE_BYTES, pairs},
            on_right{rows, rows + TILE_BYTES, thin, thin, 2 * TILE_BYTES, step, pairs};
        alignas(64) float sums[32 * 32];
        for (int64_t block = 0; block < p.rows.sheet.blocks; ++block) {
            for (int64_t pair = 0; pair < pairs; ++pair)
                couple(p.rows.sheet.tile(group + 2 * pair, block),
                       2 * pair + 1 < all ? p.rows.sheet.tile(group + 2 * pair + 1, block) : nullptr,
                       rows + 2 * TILE_BYTES * pair);
            float* const to = total + 1024 * block;
            if (p.rows.turned)
                dot<ON_THE_RIGHT>(&on_right, 1, MOST_CUTS, true, false, {}, sums);
            else
                dot<ON_THE_LEFT>(&on_left, 1, MOST_CUTS, false, true, {}, sums);
            for (int64_t i = 0; i < (p.rows.turned ? 32 : 16); ++i)
                for (int64_t j = 0; j < (p.rows.turned ? 16 : 32); j += 16)
                    store(to + 32 * i + j, load(to + 32 * i + j) + load(sums + 32 * i + j));
        }
    }

    // Exchanges the halves of two tiles: writes the lower halves of both, then the upper halves.
    static void couple(const char* a, const char* b, char* out) {
        for (int i = 0; i < 16; ++i) {
            const __m512i x = _mm512_load_si512(a + 64 * i),
                          y = b ? _mm512_load_si512(b + 64 * i) : _mm512_setzero_si512();
            _mm512_store_si512(out + 64 * i, lower_halves(x, y));
            _mm512_store_si512(out + TILE_BYTES + 64 * i, upper_halves(x, y));
        }
    }

    // Prepares 16 ranks of 32 routes per step: [pair of groups][cut], words with one route of each group.
    void lay_thin(const Product& p, int64_t part, int64_t g, int64_t pairs, int64_t first, int64_t ranks,
                  char* out) const {
        const Cutter cutter;
        const Segment& s = call_.grouping.parts[part];
        const __mmask16 mask = static_cast<__mmask16>(columns_mask(first, ranks < first + 16 ? ranks : first + 16));
        const auto row = [&](int64_t i) {
            if (i >= s.count) return _mm512_setzero_ps();
            const __m512 values = _mm512_maskz_loadu_ps(mask, p.thin + (s.begin + i) * ranks + first);
            if (!p.weighed) return values;
            return _mm512_mul_ps(values, _mm512_set1_ps(weight_at(call_.args, call_.grouping.order[s.begin + i])));
        };
        alignas(64) uint32_t words[MOST_CUTS][16][16];
        for (int64_t pair = 0; pair < pairs; ++pair) {
            for (int64_t i = 0; i < 16; ++i) {
                __m512 a = row(16 * g + 32 * pair + i), b = row(16 * g + 32 * pair + 16 + i);
                for (int64_t cut = 0; cut < MOST_CUTS; ++cut) _mm512_store_si512(words[cut][i], cutter.pair(a, b));
            }
            for (int64_t cut = 0; cut < MOST_CUTS; ++cut, out += 2 * TILE_BYTES)
                if (p.rows.turned)
                    std::memcpy(out, words[cut], TILE_BYTES);
                else
                    transpose(reinterpret_cast<const char*>(words[cut]), 64, reinterpret_cast<uint32_t*>(out));
        }
    }

    // out: [rank, column], or its transpose
    void write_block(const Product& p, const Factor& out, int64_t first, int64_t height, int64_t block, float scale,
                     const float* sums) const {
        int64_t col = 32 * block, width = p.rows.columns - col < 32 ? p.rows.columns - col : 32;
        if (p.rows.inner) {
            const Strip c = call_.strip(block);
            col = c.begin, width = c.width;
        }
        alignas(64) float line[32];
        if (p.rows.turned) {  // sums: [column][rank]
            for (int64_t j = 0; j < width; ++j) {
                for (int64_t r = 0; r < 16; r += LANES) store(line + r, all(scale) * load(sums + 32 * j + r));
                if (out.row == 1)
                    write(out.place(first, col + j), out.bf16, height, line);
                else
                    for (int64_t r = 0; r < height; ++r) out.put(first + r, col + j, line[r]);
            }
            return;
        }
        for (int64_t r = 0; r < height; ++r) {  // [rank][even columns, odd columns]
            for (int64_t j = 0; j < 16; ++j)
                line[2 * j] = scale * sums[32 * r + j], line[2 * j + 1] = scale * sums[32 * r + 16 + j];
            if (out.column == 1)
                write(out.place(first + r, col), out.bf16, width, line);
            else
                for (int64_t j = 0; j < width; ++j) out.put(first + r, col + j, line[j]);
        }
    }

    static void clear(const Factor& to, int64_t rows, int64_t columns) {
        if (to.column == 1 && to.row == columns) {
            std::memset(to.data, 0, static_cast<size_t>(rows * columns) * (to.bf16 ? 2 : 4));
            return;
        }
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) to.put(i, j, 0);
    }

    const TileCall& call_;
    const Region<char> thin_, rows_;
    const Region<float> total_;
};

}  // namespace gs::GS_LEVEL

#endif
