// The forward of vectors/forward.h with products of whole tiles, in phases:
//   hidden  a part's rows of x as tiles, A_gate x and A_up x; then g, u and h in blocks of 32 features
//   output  A_down h of a part; then the rows of its routes in blocks of 32 columns
//   sums    y: the sum of a token's rows in the order of the slots
#pragma once

#include "call.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct TileForward : TileCall {
    const int64_t columns;  // columns of the result at once
    const Region<char> x_data, h_data, gate_tiles, up_tiles;
    const Region<float> gate_scales, up_scales;  // scales of unscaled codes
    const Region<float> gate_thin, up_thin, down_thin, lines;
    const Region<float> result;  // [slots of a chunk][columns]

    TileForward(const gs_moe_args& a, const Grouping& p)
        : TileCall(a, p),
          columns(given(a.rows) ? outer_blocks * 32 : columns_at_once()),
          x_data(sheet(outer_blocks)),
          h_data(sheet(inner_blocks)),
          gate_tiles(arena.each<char>(tiles_bytes())),
          up_tiles(arena.each<char>(tiles_bytes())),
          gate_scales(arena.each<float>(scales_count())),
          up_scales(arena.each<float>(scales_count())),
          gate_thin(arena.shared<float>(p.routes * ranks(a.gate))),
          up_thin(arena.shared<float>(p.routes * ranks(a.up))),
          down_thin(arena.shared<float>(p.routes * ranks(a.down))),
          lines(arena.each<float>(32 * (ranks(a.gate) + ranks(a.up) + ranks(a.down)))),
          result(arena.shared<float>(given(a.rows) ? 0 : p.chunk_routes * columns)) {
        arena.allocate();
        number_groups();
    }

    void run() {
        skipped();
        for (const gs_tensor* t : {&args.g, &args.u})
            if (given(*t)) prefer_huge_pages(t->data, static_cast<size_t>(args.tokens * slots * inner) * 2);
        in_turn(
            0, parts, split(parts, inner_blocks, 4),
            [&](int64_t part, int64_t from, int64_t to, int worker) { lay(part, from, to, worker); },
            [&](int64_t part, int64_t begin, int64_t end, int worker) { hidden(part, begin, end, worker); });
        for (int64_t chunk = 0; chunk < grouping.chunk_count; ++chunk)
            for (int64_t col = 0; col < outer; col += columns) give(grouping.chunks[chunk], col);
        arena.check();
    }

private:
    void lay(int64_t part, int64_t from, int64_t to, int worker) const {
        const int64_t expert = grouping.parts[part].expert;
        fill(x, xs(), false, part, from, to);
        if (ranks(args.gate))
            thin(part, from, to, xs(), false, transposed(factor_of(args.gate.a, expert)), outer, false,
                 ranks(args.gate), worker, gate_thin.data());
        if (ranks(args.up))
            thin(part, from, to, xs(), false, transposed(factor_of(args.up.a, expert)), outer, false, ranks(args.up),
                 worker, up_thin.data());
    }

    Sheet xs() const { return {x_data.data(), outer_blocks}; }
    Sheet hs() const { return {h_data.data(), inner_blocks}; }

    int64_t scales_count() const {
        int64_t most = 0;
        for (int64_t i = 0; i < args.slice_count; ++i)
            for (const gs_matrix* m : {&args.slices[i].gate, &args.slices[i].up, &args.slices[i].down}) {
                const int64_t count = scales_on_the_right(*m);
                most = count > most ? count : most;
            }
        return most;
    }
    int64_t tiles_bytes() const {
        const int64_t step = 2 * TILE_BYTES;
        int64_t most = 0;
        for (int64_t i = 0; i < args.slice_count; ++i) {
            const gs_slice& s = args.slices[i];
            const int64_t up = cuts_on_the_right(s.gate) * step * outer_blocks,
                          down = cuts_on_the_right(s.down) * step * inner_blocks;
            most = up > most ? up : most, most = down > most ? down : most;
        }
        return args.slices[0].gate.format == GS_PACKED_BF16 ? 0 : most;
    }

    // Zeroes the saved rows of skipped slots: they are never used, but they are outputs.
    void skipped() const {
        const size_t bytes = static_cast<size_t>(inner) * 2;
        if (!given(args.g) || grouping.routes == args.tokens * slots) return;
        for (int64_t route = 0; route < args.tokens * slots; ++route)
            if (id_at(args, route) < 0)
                for (const gs_tensor* t : {&args.g, &args.u})
                    std::memset(static_cast<char*>(t->data) + route * inner * 2, 0, bytes);
    }

    // Computes blocks [begin, end) of 32 features for all rows of a part.
    void hidden(int64_t part, int64_t begin, int64_t end, int worker) const {
        const Segment& s = grouping.parts[part];
        const Sheet rows = xs();
        const int64_t all = groups_of(part), pairs = (all + 1) / 2;
        float *g = sums(worker), *u = g + 32 * 32, *gate_lines = lines.data(worker),
              *up_lines = gate_lines + 32 * ranks(args.gate);
        for (int64_t block = begin; block < end; ++block) {
            const Strip c = strip(block);
            const gs_slice& slice = args.slices[c.slice];
            Link gate{}, up{};
            RightDecoder gate_rest, up_rest;
            right_link(slice.gate, s.expert, c.first, outer_blocks, pairs == 1, gate_tiles.data(worker),
                       gate_scales.data(worker), gate_rest, gate);
            right_link(slice.up, s.expert, c.first, outer_blocks, pairs == 1, up_tiles.data(worker),
                       up_scales.data(worker), up_rest, up);
            if (ranks(args.gate))
                wide_lines(transposed(factor_of(args.gate.b, s.expert)), ranks(args.gate), args.gate.scale, c.begin,
                           inner, gate_lines);
            if (ranks(args.up))
                wide_lines(transposed(factor_of(args.up.b, s.expert)), ranks(args.up), args.up.scale, c.begin, inner,
                           up_lines);
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const bool two = 2 * pair + 1 < all;
                const int64_t group = groups.data()[part] + 2 * pair, place = s.begin + 32 * pair,
                              left = s.begin + s.count - place, count = left < 32 ? left : 32;
                for (Link* link : {&gate, &up}) {
                    link->upper = rows.tile(group, 0), link->lower = rows.tile(group + (two ? 1 : 0), 0);
                    link->left_step = TILE_BYTES;
                }
                for (int64_t half = 0; half < (two ? 2 : 1); ++half) fetch_to_write(hs().tile(group + half, block), 16);
                right_dot(slice.gate, gate, gate_scales.data(worker), gate_rest, two,
                          next(slice.gate, s.expert, c.first, outer_blocks, pair, pairs), g);
                right_dot(slice.up, up, up_scales.data(worker), up_rest, two,
                          next(slice.up, s.expert, c.first, outer_blocks, pair, pairs), u);
                if (ranks(args.gate))
                    wide(gate_thin.data() + place * ranks(args.gate), ranks(args.gate), gate_lines, count, g);
                if (ranks(args.up)) wide(up_thin.data() + place * ranks(args.up), ranks(args.up), up_lines, count, u);
                activate(s, c, group, place, count, two ? 32 : 16, g, u);
            }
        }
        _mm_sfence();  // completes the non-temporal stores
    }

    // The share of the next 32 outputs that is prefetched while one of `pairs` pairs of groups is multiplied.
    static Ahead next(const gs_matrix& m, int64_t expert, int64_t row, int64_t steps, int64_t pair, int64_t pairs) {
        const int64_t share = pairs * steps;
        if (share == 0 || bytes_of_block(m, true) == 0 || takes_codes(m)) return {};
        const int64_t line = (m.panel_bytes / 32 + share - 1) / share;
        return {panel_of(m, expert, row, false).data + 2 * m.panel_bytes + pair * line * 64 * steps, line};
    }

    void activate(const Segment& s, const Strip& c, int64_t group, int64_t place, int64_t count, int64_t rows, float* g,
                  float* u) const {
        const Activation act{args.activation, static_cast<float>(args.alpha), static_cast<float>(args.limit)};
        const Factor bias = matrix_of(args.gate_up_bias);
        const Sheet to = hs();
        const __mmask32 mask = columns_mask(0, c.width);
        for (int64_t i = 0; i < rows; ++i, g += 32, u += 32) {
            char* const out = to.tile(group + i / 16, c.block) + 64 * (i % 16);
            if (i >= count) {
                _mm512_store_si512(out, _mm512_setzero_si512());
                continue;
            }
            if (given(args.gate_up_bias))
                for (int64_t j = 0; j < c.width; ++j)
                    g[j] += bias.at(s.expert, c.begin + j), u[j] += bias.at(s.expert, inner + c.begin + j);
            const int64_t at = grouping.order[place + i] * inner + c.begin;
            const __m512i gs = rounded_row(load(g), load(g + 16)), us = rounded_row(load(u), load(u + 16));
            if (given(args.g)) {
                save(static_cast<uint16_t*>(args.g.data) + at, mask, gs);
                save(static_cast<uint16_t*>(args.u.data) + at, mask, us);
            }
            // the backward uses the saved (rounded) values, so h does, too
            const __m512i h =
                rounded_row(act.value(half_row(gs, 0), half_row(us, 0)), act.value(half_row(gs, 1), half_row(us, 1)));
            _mm512_store_si512(out, _mm512_maskz_mov_epi16(mask, h));
        }
    }

    // Nothing reads it before the backward, so whole lines are stored past the caches.
    static void save(uint16_t* to, __mmask32 mask, __m512i values) {
        if (mask == 0xffffffffu && reinterpret_cast<uintptr_t>(to) % 64 == 0)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to), values);
        else
            _mm512_mask_storeu_epi16(to, mask, values);
    }

    // Computes columns [col, col + columns) of a chunk's result.
    void give(const Chunk& chunk, int64_t col) {
        const int64_t width = outer - col < columns ? outer - col : columns, count = chunk.last - chunk.first;
        in_turn(
            chunk.first, chunk.last, split(count, (width + 31) / 32, 4),
            [&](int64_t part, int64_t from, int64_t to, int worker) {
                if (ranks(args.down) && col == 0)
                    thin(part, from, to, hs(), false, transposed(factor_of(args.down.a, grouping.parts[part].expert)),
                         inner, true, ranks(args.down), worker, down_thin.data());
            },
            [&](int64_t part, int64_t begin, int64_t end, int worker) {
                output(chunk, part, col, col / 32 + begin, col / 32 + end, worker);
            });
        constexpr int64_t rows = 16;
        parallel_for((chunk.end - chunk.begin + rows - 1) / rows, [&](int64_t item, int) {
            const int64_t first = chunk.begin + item * rows, last = first + rows;
            for (int64_t t = first; t < last && t < chunk.end; ++t)
                if (given(args.rows))
                    finish_rows(t);
                else
                    add_up(chunk, t, col, width, true, result.data(), columns, args.y);
        });
    }

    void output(const Chunk& chunk, int64_t part, int64_t col, int64_t begin, int64_t end, int worker) const {
        const Segment& s = grouping.parts[part];
        const Sheet rows = hs();
        const int64_t all = groups_of(part), pairs = (all + 1) / 2;
        float *sum = sums(worker), *down_lines = lines.data(worker);
        for (int64_t block = begin; block < end; ++block) {
            const int64_t at = 32 * block, width = outer - at < 32 ? outer - at : 32;
            if (ranks(args.down))
                wide_lines(transposed(factor_of(args.down.b, s.expert)), ranks(args.down), args.down.scale, at, outer,
                           down_lines);
            int64_t from = 0;
            for (int64_t i = 0; i < args.slice_count; from += blocks_of_slice(i++)) {
                const gs_matrix& m = args.slices[i].down;
                if (i > 0 && blocks_of_slice(i) == 0) continue;
                Link link{};
                RightDecoder rest;
                right_link(m, s.expert, at, blocks_of_slice(i), pairs == 1, gate_tiles.data(worker),
                           gate_scales.data(worker), rest, link);
                for (int64_t pair = 0; pair < pairs; ++pair) {
                    const bool two = 2 * pair + 1 < all;
                    const int64_t group = groups.data()[part] + 2 * pair, place = s.begin + 32 * pair,
                                  left = s.begin + s.count - place, count = left < 32 ? left : 32;
                    link.upper = rows.tile(group, from), link.lower = rows.tile(group + (two ? 1 : 0), from);
                    link.left_step = TILE_BYTES;
                    for (int64_t k = place; k < place + count; ++k) fetch_to_write(row_of(chunk, k, at, at - col), 2);
                    right_dot(m, link, gate_scales.data(worker), rest, two,
                              next(m, s.expert, at, blocks_of_slice(i), pair, pairs), sum);
                    if (i == 0 && ranks(args.down))
                        wide(down_thin.data() + place * ranks(args.down), ranks(args.down), down_lines, count, sum);
                    if (i == 0 && given(args.down_bias))
                        for (int64_t k = 0; k < count; ++k)
                            for (int64_t j = 0; j < width; ++j)
                                sum[32 * k + j] += matrix_of(args.down_bias).at(s.expert, at + j);
                    place_rows(chunk, place, count, at, at - col, width, i > 0, sum);
                }
            }
        }
    }

    // Address for the route at a place of output column `at`, which is column `col` of the result.
    float* row_of(const Chunk& chunk, int64_t place, int64_t at, int64_t col) const {
        const int64_t route = grouping.order[place];
        return given(args.rows) ? static_cast<float*>(args.rows.data) + route * outer + at
                                : result.data() + (route - chunk.begin * slots) * columns + col;
    }

    // Stores 32 columns of some routes, or adds to them for slices after the first one.
    void place_rows(const Chunk& chunk, int64_t place, int64_t count, int64_t at, int64_t col, int64_t width, bool add,
                    const float* sum) const {
        for (int64_t k = 0; k < count; ++k, sum += 32) {
            float* to = row_of(chunk, place + k, at, col);
            const __mmask16 low = static_cast<__mmask16>(columns_mask(0, width)),
                            high = static_cast<__mmask16>(columns_mask(16, width));
            __m512 a = _mm512_load_ps(sum), b = _mm512_load_ps(sum + 16);
            if (add)
                a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(low, to)),
                b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(high, to + 16));
            _mm512_mask_storeu_ps(to, low, a), _mm512_mask_storeu_ps(to + 16, high, b);
        }
    }

    void finish_rows(int64_t t) const {
        for (int64_t route = t * slots; route < (t + 1) * slots; ++route) {
            float* row = static_cast<float*>(args.rows.data) + route * outer;
            if (id_at(args, route) < 0) std::memset(row, 0, static_cast<size_t>(outer) * 4);
            if (given(args.flags)) static_cast<uint8_t*>(args.flags.data)[route] = !all_finite(row, outer);
        }
    }
};

}  // namespace gs::GS_LEVEL

#endif
