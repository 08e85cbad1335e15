// The backward of vectors/backward.h with products of whole tiles, in phases:
//   inside  a part's rows of dy, transposed, and of x; B_down^T dy, and A_gate x, A_up x again if dB needs them; then
//           v = Wd^T dy + ..., the terms of dw, h, dg and du in blocks of 32 features
//   dx      dw: the sum of its terms in order; B_gate^T dg, B_up^T du, A_down h; then the rows of a part's routes in
//           blocks of 32 columns, and the sum of a token's rows in the order of the slots
//   sums    the gradients of LoRA
#pragma once

#include "lora_gradients.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct TileBackward : TileCall {
    const Rows dy;
    const int64_t columns;  // columns of dx at once
    const bool want_x;
    const bool gate_folded;  // the scales of gate and up are multiplied into second copies of dg and du
    const Region<char> x_data, dy_data, h_data, dg_data, du_data, scaled_dg, scaled_du, scaled_dy, tiles;
    const Region<float> x_gate, x_up, h_down, dy_down, dg_gate, du_up;
    const Region<float> shares;   // [places, inner_blocks]: terms of dw
    const Region<float> weights;  // in the order of the groups
    const Region<float> lines, turned, result;
    const Region<Link> links;
    const Region<BlockScales> scales;
    const TileSums lora;

    TileBackward(const gs_moe_args& a, const Grouping& p)
        : TileCall(a, p),
          dy(rows_of(a.dy, a.hidden, a.slots)),
          columns(columns_at_once()),
          want_x(given(a.gate.da) || given(a.up.da) || given(a.gate.db) || given(a.up.db)),
          gate_folded(left_way(a.slices[0].gate) == FOLDED),
          x_data(sheet(want_x ? outer_blocks : 0)),
          dy_data(sheet(outer_blocks)),
          h_data(sheet(inner_blocks)),
          dg_data(sheet(inner_blocks)),
          du_data(sheet(inner_blocks)),
          scaled_dg(sheet(gate_folded ? inner_blocks : 0)),
          scaled_du(sheet(gate_folded ? inner_blocks : 0)),
          scaled_dy(arena.each<char>(scaled_bytes())),
          tiles(arena.each<char>(2 * tiles_bytes())),
          x_gate(thin_of(a.gate, given(a.gate.db))),
          x_up(thin_of(a.up, given(a.up.db))),
          h_down(thin_of(a.down, given(a.down.db))),
          dy_down(thin_of(a.down, true)),
          dg_gate(thin_of(a.gate, true)),
          du_up(thin_of(a.up, true)),
          shares(arena.shared<float>(p.routes * inner_blocks)),
          weights(arena.shared<float>(p.routes)),
          lines(arena.each<float>(32 * (ranks(a.gate) + ranks(a.up) + ranks(a.down)))),
          turned(arena.each<float>(32 * 32)),
          result(arena.shared<float>(given(a.dx) ? p.chunk_routes * columns : 0)),
          links(arena.each<Link>(2 * a.slice_count)),
          scales(arena.each<BlockScales>(2 * a.slice_count)),
          lora(*this) {
        arena.allocate();
        number_groups();
    }

    void run() {
        in_turn(
            0, parts, split(parts, inner_blocks, 2),
            [&](int64_t part, int64_t from, int64_t to, int worker) { lay(part, from, to, worker); },
            [&](int64_t part, int64_t begin, int64_t end, int worker) { inside(part, begin, end, worker); });
        if (given(args.dweights)) skipped();
        for (int64_t chunk = 0; chunk < grouping.chunk_count; ++chunk)
            if (given(args.dx))
                for (int64_t col = 0; col < outer; col += columns) give(grouping.chunks[chunk], col);
            else
                in_halves(grouping.chunks[chunk].first, grouping.chunks[chunk].last,
                          [&](int64_t part, int64_t from, int64_t to, int worker) { narrow(part, from, to, worker); });
        const TileSums::Rows xrows{xs(), outer, false, false}, dyrows{dys(), outer, true, false},
            hrows{hs(), inner, false, true}, dgrows{dgs(), inner, true, true}, durows{dus(), inner, true, true};
        const TileSums::Product all[] = {
            {&args.gate.da, &args.gate, dg_gate.data(), false, xrows},
            {&args.up.da, &args.up, du_up.data(), false, xrows},
            {&args.down.da, &args.down, dy_down.data(), true, hrows},
            {&args.gate.db, &args.gate, x_gate.data(), false, dgrows},
            {&args.up.db, &args.up, x_up.data(), false, durows},
            {&args.down.db, &args.down, h_down.data(), true, dyrows},
        };
        lora.give(all, 6);
        arena.check();
    }

private:
    void lay(int64_t part, int64_t from, int64_t to, int worker) const {
        const int64_t e = grouping.parts[part].expert;
        each_group(part, from, to, [&](int64_t, int64_t place, int64_t count) {
            for (int64_t i = place; i < place + count; ++i) weights.data()[i] = weight_at(args, grouping.order[i]);
        });
        fill(dy, dys(), true, part, from, to);
        if (want_x) fill(x, xs(), false, part, from, to);
        if (ranks(args.down))
            thin(part, from, to, dys(), true, factor_of(args.down.b, e), outer, false, ranks(args.down), worker,
                 dy_down.data());
        if (given(args.gate.db))
            thin(part, from, to, xs(), false, transposed(factor_of(args.gate.a, e)), outer, false, ranks(args.gate),
                 worker, x_gate.data());
        if (given(args.up.db))
            thin(part, from, to, xs(), false, transposed(factor_of(args.up.a, e)), outer, false, ranks(args.up), worker,
                 x_up.data());
    }

    void narrow(int64_t part, int64_t from, int64_t to, int worker) const {
        const int64_t e = grouping.parts[part].expert;
        if (given(args.dweights)) write_weight_gradients(part, from, to);
        if (ranks(args.gate))
            thin(part, from, to, dgs(), true, factor_of(args.gate.b, e), inner, true, ranks(args.gate), worker,
                 dg_gate.data());
        if (ranks(args.up))
            thin(part, from, to, dus(), true, factor_of(args.up.b, e), inner, true, ranks(args.up), worker,
                 du_up.data());
        if (given(args.down.db))
            thin(part, from, to, hs(), false, transposed(factor_of(args.down.a, e)), inner, true, ranks(args.down),
                 worker, h_down.data());
    }

    Sheet xs() const { return {x_data.data(), outer_blocks}; }
    Sheet dys() const { return {dy_data.data(), outer_blocks}; }
    Sheet hs() const { return {h_data.data(), inner_blocks}; }
    Sheet dgs() const { return {dg_data.data(), inner_blocks}; }
    Sheet dus() const { return {du_data.data(), inner_blocks}; }
    // the rows that are multiplied with the weights
    Sheet dgs_times() const { return gate_folded ? Sheet{scaled_dg.data(), inner_blocks} : dgs(); }
    Sheet dus_times() const { return gate_folded ? Sheet{scaled_du.data(), inner_blocks} : dus(); }
    Region<float> thin_of(const gs_lora& factors, bool wanted) {
        return arena.shared<float>(wanted ? grouping.routes * ranks(factors) : 0);
    }

    // Bytes for a part's rows of dy times the scales of down's rows.
    int64_t scaled_bytes() const {
        int64_t pairs = 0;
        for (int64_t i = 0; i < args.slice_count; ++i)
            if (left_way(args.slices[i].down) == FOLDED)
                for (int64_t part = 0; part < parts; ++part) {
                    const int64_t here = (grouping.parts[part].count + 31) / 32;
                    pairs = here > pairs ? here : pairs;
                }
        return pairs * outer_blocks * FOLDED_CUTS * 2 * TILE_BYTES;
    }

    int64_t tiles_bytes() const {
        int64_t most = 0, both = 0;
        for (int64_t i = 0; i < args.slice_count; ++i) {
            const gs_slice& s = args.slices[i];
            const int64_t steps = blocks_of_slice(i),
                          down = strip_bytes(s.down, outer_blocks < ROUND ? ROUND : outer_blocks);
            most = down > most ? down : most, both += 2 * strip_bytes(s.gate, steps < ROUND ? ROUND : steps);
        }
        return most > both ? most : both;
    }

    // Computes blocks [begin, end) of 32 features for all rows of a part.
    void inside(int64_t part, int64_t begin, int64_t end, int worker) const {
        const Segment& s = grouping.parts[part];
        const Sheet rows = dys();
        const int64_t all = groups_of(part), pairs = (all + 1) / 2, r = ranks(args.down);
        float *sum = sums(worker), *v = turned.data(worker);
        const bool once = used_once(args.slices[0].down, pairs);
        if (begin < end && !once) next_tiles(true, s.expert, 1, begin, worker).finish();
        int64_t slice = -1;
        for (int64_t block = begin; block < end; ++block) {
            const Strip c = strip(block);
            const gs_matrix& m = args.slices[c.slice].down;
            const LeftWay way = left_way(m);
            if (way == FOLDED && c.slice != slice) fold_dy(part, m, worker);
            slice = c.slice;
            const BlockScales of_blocks = way == BY_BLOCK ? block_scales(m, s.expert, c.first) : BlockScales{};
            Link link{};
            left_link(m, tiles.data(worker) + block % 2 * tiles_bytes(), link);
            if (r) wide_lines(factor_of(args.down.a, s.expert), r, args.down.scale, c.begin, inner, lines.data(worker));
            LeftDecoder next = next_tiles(true, s.expert, pairs, once ? block : block + 1, worker, once);
            if (once) LeftDecoder::step(&next), LeftDecoder::step(&next);
            const Ahead ahead{nullptr, 0, once || block + 1 < end ? LeftDecoder::step : nullptr, &next};
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const bool two = 2 * pair + 1 < all;
                const int64_t group = groups.data()[part] + 2 * pair, place = s.begin + 32 * pair,
                              left = s.begin + s.count - place, count = left < 32 ? left : 32;
                link.first = rows.tile(group, 0), link.second = rows.tile(group + (two ? 1 : 0), 0);
                for (int64_t i = place; i < place + count; ++i)
                    for (const gs_tensor* t : {&args.g, &args.u})
                        __builtin_prefetch(static_cast<const uint16_t*>(t->data) + grouping.order[i] * inner + c.begin);
                if (way == FOLDED) {
                    link.first = scaled_dy.data(worker) + pair * scaled_step(), link.second = link.first + TILE_BYTES;
                    link.right_step = FOLDED_CUTS * 2 * TILE_BYTES;
                    dot<ON_THE_RIGHT>(&link, 1, FOLDED_CUTS, true, two, ahead, sum);
                } else if (way == BY_BLOCK) {
                    dot_blocks(&link, &of_blocks, 1, two, ahead, sum);
                } else {
                    left_dot(once, &link, 1, cuts(m), two, ahead, sum);
                }
                turn(sum, v);
                if (r) wide(dy_down.data() + place * r, r, lines.data(worker), count, v);
                for (int64_t half = 0; half < (two ? 2 : 1); ++half)
                    derive(c, s.expert, group + half, place + 16 * half, count - 16 * half, v + 512 * half);
            }
            if (block + 1 < end && !once) next.finish();
        }
    }

    int64_t scaled_step() const { return outer_blocks * FOLDED_CUTS * 2 * TILE_BYTES; }
    void fold_dy(int64_t part, const gs_matrix& m, int worker) const {
        const Sheet rows = dys();
        const int64_t all = groups_of(part), group = groups.data()[part];
        for (int64_t g = 0; g < all; g += 2)
            fold_scales(m, grouping.parts[part].expert, rows.tile(group + g, 0),
                        g + 1 < all ? rows.tile(group + g + 1, 0) : nullptr, outer_blocks,
                        scaled_dy.data(worker) + g / 2 * scaled_step());
    }

    // The decoder of down's tiles for a block of features, or of gate's and up's for a block of columns; there is
    // memory for two blocks.
    LeftDecoder next_tiles(bool down, int64_t expert, int64_t pairs, int64_t block, int worker,
                           bool once = false) const {
        return {*this, down, expert, pairs, block, once, tiles.data(worker) + block % 2 * tiles_bytes()};
    }

    // From v of 16 rows: their terms of dw, h, dg and du.
    void derive(const Strip& c, int64_t expert, int64_t group, int64_t place, int64_t count, const float* v) const {
        const Activation act{args.activation, static_cast<float>(args.alpha), static_cast<float>(args.limit)};
        const __mmask32 mask = columns_mask(0, c.width);
        alignas(64) uint32_t dg[16][16], du[16][16], scaled[2][16][16];
        char* const h = hs().tile(group, c.block);
        Floats by[2][2];  // scales of gate's and up's rows
        if (gate_folded) {
            row_scales(args.slices[c.slice].gate, expert, c.first, by[0][0], by[0][1]);
            row_scales(args.slices[c.slice].up, expert, c.first, by[1][0], by[1][1]);
        }
        for (int64_t i = 0; i < 16; ++i, v += 32) {
            if (i >= count) {
                for (void* line : {static_cast<void*>(h + 64 * i), static_cast<void*>(dg[i]), static_cast<void*>(du[i]),
                                   static_cast<void*>(scaled[0][i]), static_cast<void*>(scaled[1][i])})
                    _mm512_store_si512(line, _mm512_setzero_si512());
                continue;
            }
            const int64_t route = grouping.order[place + i], at = route * inner + c.begin;
            const __m512i g = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(args.g.data) + at),
                          u = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(args.u.data) + at);
            const Floats w = all(weights.data()[place + i]), low = load(v), high = load(v + 16);
            const auto a = act.gradients(half_row(g, 0), half_row(u, 0), w * low),
                       b = act.gradients(half_row(g, 1), half_row(u, 1), w * high);
            shares.data()[(place + i) * inner_blocks + c.block] = _mm512_reduce_add_ps(fma(low, a.h, high * b.h).v);
            _mm512_store_si512(h + 64 * i, rounded_row(a.h, b.h));
            _mm512_store_si512(dg[i], rounded_apart(a.dg, b.dg));
            _mm512_store_si512(du[i], rounded_apart(a.du, b.du));
            if (gate_folded) {
                _mm512_store_si512(scaled[0][i], rounded_apart(a.dg * by[0][0], b.dg * by[0][1]));
                _mm512_store_si512(scaled[1][i], rounded_apart(a.du * by[1][0], b.du * by[1][1]));
            }
        }
        transpose(reinterpret_cast<const char*>(dg), 64, reinterpret_cast<uint32_t*>(dgs().tile(group, c.block)));
        transpose(reinterpret_cast<const char*>(du), 64, reinterpret_cast<uint32_t*>(dus().tile(group, c.block)));
        if (!gate_folded) return;
        transpose(reinterpret_cast<const char*>(scaled[0]), 64,
                  reinterpret_cast<uint32_t*>(dgs_times().tile(group, c.block)));
        transpose(reinterpret_cast<const char*>(scaled[1]), 64,
                  reinterpret_cast<uint32_t*>(dus_times().tile(group, c.block)));
    }

    void skipped() const {
        const Factor out = matrix_of(args.dweights);
        for (int64_t route = 0; route < args.tokens * slots; ++route)
            if (id_at(args, route) < 0) out.put(route / slots, route % slots, 0);
    }

    void write_weight_gradients(int64_t part, int64_t from, int64_t until) const {
        const Factor out = matrix_of(args.dweights);
        each_group(part, from, until, [&](int64_t, int64_t place, int64_t count) {
            for (int64_t i = place; i < place + count; ++i) {
                const int64_t route = grouping.order[i];
                float total = 0;
                for (int64_t k = 0; k < inner_blocks; ++k) total += shares.data()[i * inner_blocks + k];
                if (given(args.down_bias)) total += dot_bias(args, dy, grouping.parts[part].expert, route);
                out.put(route / slots, route % slots, total);
            }
        });
    }

    // Computes columns [col, col + columns) of a chunk's dx.
    void give(const Chunk& chunk, int64_t col) const {
        const int64_t width = outer - col < columns ? outer - col : columns, count = chunk.last - chunk.first;
        in_turn(
            chunk.first, chunk.last, split(count, (width + 31) / 32, 2),
            [&](int64_t part, int64_t from, int64_t to, int worker) {
                if (col == 0) narrow(part, from, to, worker);
            },
            [&](int64_t part, int64_t begin, int64_t end, int worker) {
                write_rows(chunk, part, col, col / 32 + begin, col / 32 + end, worker);
            });
        constexpr int64_t rows = 16;
        parallel_for((chunk.end - chunk.begin + rows - 1) / rows, [&](int64_t item, int) {
            const int64_t first = chunk.begin + item * rows, last = first + rows;
            for (int64_t t = first; t < last && t < chunk.end; ++t)
                add_up(chunk, t, col, width, false, result.data(), columns, args.dx);
        });
    }

    // Address of a column of the result for the route at a place.
    float* row_of(const Chunk& chunk, int64_t place, int64_t col) const {
        return result.data() + (grouping.order[place] - chunk.begin * slots) * columns + col;
    }

    void write_rows(const Chunk& chunk, int64_t part, int64_t col, int64_t begin, int64_t end, int worker) const {
        const Segment& s = grouping.parts[part];
        const int64_t all = groups_of(part), pairs = (all + 1) / 2;
        float *sum = sums(worker), *rows = turned.data(worker), *gate_lines = lines.data(worker),
              *up_lines = gate_lines + 32 * ranks(args.gate);
        Link* const list = links.data(worker);
        BlockScales* const list_of_scales = scales.data(worker);
        const LeftWay way = left_way(args.slices[0].gate);
        const int count_of_cuts = cuts_on_the_left(args.slices[0].gate);
        const bool once = used_once(args.slices[0].gate, pairs);
        if (begin < end && !once) next_tiles(false, s.expert, 1, begin, worker).finish();
        for (int64_t block = begin; block < end; ++block) {
            char* at = tiles.data(worker) + block % 2 * tiles_bytes();
            for (int64_t i = 0; i < 2 * args.slice_count; ++i) {
                const gs_matrix& m = i % 2 ? args.slices[i / 2].up : args.slices[i / 2].gate;
                left_link(m, at, list[i]);
                if (way == BY_BLOCK) list_of_scales[i] = block_scales(m, s.expert, 32 * block);
                at += strip_bytes(m, once ? ROUND : blocks_of_slice(i / 2));
            }
            if (ranks(args.gate))
                wide_lines(factor_of(args.gate.a, s.expert), ranks(args.gate), args.gate.scale, 32 * block, outer,
                           gate_lines);
            if (ranks(args.up))
                wide_lines(factor_of(args.up.a, s.expert), ranks(args.up), args.up.scale, 32 * block, outer, up_lines);
            LeftDecoder next = next_tiles(false, s.expert, pairs, once ? block : block + 1, worker, once);
            if (once) LeftDecoder::step(&next), LeftDecoder::step(&next);
            const Ahead ahead{nullptr, 0, once || block + 1 < end ? LeftDecoder::step : nullptr, &next};
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const bool two = 2 * pair + 1 < all;
                const int64_t group = groups.data()[part] + 2 * pair, place = s.begin + 32 * pair,
                              left = s.begin + s.count - place, count = left < 32 ? left : 32;
                for (int64_t i = 0, from = 0; i < args.slice_count; from += blocks_of_slice(i++))
                    for (int64_t which = 0; which < 2; ++which) {
                        const Sheet d = which ? dus_times() : dgs_times();
                        Link& link = list[2 * i + which];
                        link.first = d.tile(group, from), link.second = d.tile(group + (two ? 1 : 0), from);
                    }
                for (int64_t k = place; k < place + count; ++k) fetch_to_write(row_of(chunk, k, 32 * block - col), 2);
                if (way == BY_BLOCK)
                    dot_blocks(list, list_of_scales, 2 * args.slice_count, two, ahead, sum);
                else
                    left_dot(once, list, 2 * args.slice_count, count_of_cuts, two, ahead, sum);
                turn(sum, rows);
                if (ranks(args.gate))
                    wide(dg_gate.data() + place * ranks(args.gate), ranks(args.gate), gate_lines, count, rows);
                if (ranks(args.up)) wide(du_up.data() + place * ranks(args.up), ranks(args.up), up_lines, count, rows);
                for (int64_t k = 0; k < count; ++k)
                    std::memcpy(row_of(chunk, place + k, 32 * block - col), rows + 32 * k, 128);
            }
            if (block + 1 < end && !once) next.finish();
        }
    }
};

}  // namespace gs::GS_LEVEL

#endif
