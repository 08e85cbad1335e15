// The gradients of forward.h, in phases:
//   thin     B_down^T dy, and A_gate x, A_up x again if dB needs them
//   inner    v = dy Wd + ..., then the terms of dw, h, dg and du: a span of I at a time
//   weights  dw: the sum of its terms in order
//   thin     B_gate^T dg, B_up^T du, A_down h
//   dx       a span of H for a chunk of tokens: the rows of its routes, then their sums in the order of the slots
//   sums     gradients of LoRA, weights and biases: sums over the routes of an expert, in order
#pragma once

#include "call.h"
#include "parameter_gradients.h"

namespace gs::GS_LEVEL {

struct Backward : Call {
    const Rows dy;
    const int down_span, gate_span;
    const int64_t inner_pieces, dx_panels;
    const int64_t pieces_at_once, panels_at_once;  // pieces and panels that one item computes
    // in the order of the groups: [places, ranks] and [places, I]
    const Region<float> x_gate, x_up, h_down, dy_down, dg_gate, du_up;
    const Region<float> parts;  // [places, inner_pieces]: terms of dw
    const Region<char> h, dg, du;
    const Region<float> rows;

    Backward(const gs_moe_args& a, const Grouping& p)
        : Call(a, p),
          dy(rows_of(a.dy, a.hidden, a.slots)),
          down_span(span(a.slices[0].down.format)),
          gate_span(span(a.slices[0].gate.format)),
          inner_pieces(pieces(down_span)),
          dx_panels((outer + gate_span - 1) / gate_span),
          pieces_at_once(together(p.segment_count * inner_pieces, BLOCKS * STRIPE / down_span)),
          panels_at_once(together(p.chunk_count * dx_panels, BLOCKS * STRIPE / gate_span)),
          x_gate(want_thin(a.gate, given(a.gate.db))),
          x_up(want_thin(a.up, given(a.up.db))),
          h_down(want_thin(a.down, given(a.down.db))),
          dy_down(want_thin(a.down, true)),
          dg_gate(want_thin(a.gate, true)),
          du_up(want_thin(a.up, true)),
          parts(arena.shared<float>(p.routes * inner_pieces)),
          h(inner_rows()),
          dg(inner_rows()),
          du(inner_rows()),
          rows(arena.each<float>(given(a.dx) ? p.chunk_routes * gate_span * panels_at_once : 0)) {
        arena.allocate();
    }

    void run() {
        fill_sheet(dy, true);
        first_thin();
        const int64_t items = (inner_pieces + pieces_at_once - 1) / pieces_at_once;
        parallel_for(grouping.segment_count * items, [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t first = item % items * pieces_at_once, left = inner_pieces - first;
            inside(grouping.segments[item / items], first, left < pieces_at_once ? left : pieces_at_once,
                   after_segment(item, items, pieces_at_once), scratch(worker), worker);
        });
        if (given(args.dweights)) write_weight_gradients();
        second_thin();
        if (given(args.dx))
            parallel_for(grouping.chunk_count * groups(), [&](int64_t item, int worker) {
                [[maybe_unused]] const Tiles tiles;
                const int64_t first = item % groups() * panels_at_once, left = dx_panels - first;
                write_dx(grouping.chunks[item / groups()], first, left < panels_at_once ? left : panels_at_once,
                         after_chunk(item, groups(), panels_at_once), scratch(worker), worker, rows.data(worker));
            });
        write_sums();
        arena.check();
    }

private:
    int64_t groups() const { return (dx_panels + panels_at_once - 1) / panels_at_once; }
    Region<float> want_thin(const gs_lora& lora, bool wanted) {
        return arena.shared<float>(wanted ? grouping.routes * ranks(lora) : 0);
    }
    Rows hidden(const gs_tensor& t) const { return rows_of(t, inner, 1); }

    // One thin product for every segment.
    template <class Gather>
    void thin_phase(const gs_lora& lora, bool wanted, int64_t depth, bool b, const Region<float>& out,
                    const Gather& gather) {
        if (!wanted || !ranks(lora)) return;
        parallel_for(grouping.segment_count, [&](int64_t item, int worker) {
            const Segment& s = grouping.segments[item];
            const Factor factor = b ? factor_of(lora.b, s.expert) : transposed(factor_of(lora.a, s.expert));
            thin(
                s, depth, factor, ranks(lora), [&](int64_t k, int64_t end, float* left) { gather(s, k, end, left); },
                scratch(worker), out.data());
        });
    }

    void first_thin() {
        const Dropout gate = dropout_of(args, GATE), up = dropout_of(args, UP);
        thin_phase(args.down, true, outer, true, dy_down, [&](const Segment& s, int64_t k, int64_t end, float* left) {
            gather_routes(dy, s, k, end, nullptr, left);
        });
        if (given(args.gate.db) && given(args.up.db) && thin_together()) {
            float* const outs[] = {x_gate.data(), x_up.data()};
            return parallel_for(grouping.segment_count, [&](int64_t item, int worker) {
                thin_x(grouping.segments[item], scratch(worker), outs);
            });
        }
        thin_phase(
            args.gate, given(args.gate.db), outer, false, x_gate,
            [&](const Segment& s, int64_t k, int64_t end, float* left) { gather_routes(x, s, k, end, &gate, left); });
        thin_phase(
            args.up, given(args.up.db), outer, false, x_up,
            [&](const Segment& s, int64_t k, int64_t end, float* left) { gather_routes(x, s, k, end, &up, left); });
    }

    void second_thin() {
        const Dropout down = dropout_of(args, DOWN);
        thin_phase(args.gate, true, inner, true, dg_gate, [&](const Segment& s, int64_t k, int64_t end, float* left) {
            gather_places(places(dg), s, k, end, nullptr, left);
        });
        thin_phase(args.up, true, inner, true, du_up, [&](const Segment& s, int64_t k, int64_t end, float* left) {
            gather_places(places(du), s, k, end, nullptr, left);
        });
        thin_phase(args.down, given(args.down.db), inner, false, h_down,
                   [&](const Segment& s, int64_t k, int64_t end, float* left) {
                       gather_places(places(h), s, k, end, &down, left);
                   });
    }

    // Computes v, and from it h, dg and du, for `count` pieces of down_span features from piece `first` on.
    void inside(const Segment& s, int64_t first, int64_t count, const NextItem& after, const Scratch& scratch,
                int worker) {
        const int stripes = down_span / STRIPE;
        for (int64_t i = 0; i < count * stripes; ++i) clear(block(scratch, i), s.count);
        const bool quick = few_back(s) && packed(args.slices[0].down);
        if (quick) {
            const FloatLines lines = lay_few_floats(dy, grouping.order + s.begin, s, 0, outer, worker);
            for (int64_t i = 0; i < count; ++i) {
                const Columns c = piece(first + i, down_span);
                add_few_inputs(args.slices[c.slice].down, s.expert, c.first, lines, s.count, ROWS * STRIPE,
                               scratch.stripes, block(scratch, i * stripes));
            }
        }
        // the weights after piece i and outputs from k on
        const auto next_of = [&](int64_t k, int64_t i) -> Next {
            const bool more = i + 1 < count, last = !more && k + DEPTH >= outer;
            const Columns c = piece(more ? first + i + 1 : last ? after.first : first, down_span);
            return {&args.slices[c.slice].down, last ? after.expert : s.expert,
                    more   ? k
                    : last ? 0
                           : k + DEPTH,
                    outer, c.first};
        };
        for (int64_t k = quick ? outer : 0; k < outer; k += DEPTH) {
            const int64_t end = k + DEPTH < outer ? k + DEPTH : outer;
            const Left left = lay_routes(dy, s, k, end, args.slices[0].down, scratch);
            for (int64_t i = 0; i < count; ++i) {
                const Columns c = piece(first + i, down_span);
                add_inputs(args.slices[c.slice].down, s, k, end, c.first, left, scratch, block(scratch, i * stripes),
                           next_of(k, i));
            }
        }
        const Dropout mask = dropout_of(args, DOWN);
        for (int64_t i = 0; i < count; ++i) {
            const Columns c = piece(first + i, down_span);
            float* sums = block(scratch, i * stripes);
            if (!quick) order_inputs(args.slices[0].down, s, sums);
            for (int j = 0; j < stripes && j * STRIPE < c.width; ++j)
                add_lora(s, args.down, dy_down.data(), mask, c.begin + j * STRIPE, c.begin + c.width, scratch,
                         sums + j * ROWS * STRIPE);
        }
        derive(s, first, count, scratch);
    }

    // sums += mask * (scale * thin A), columns from `col` on
    void add_lora(const Segment& s, const gs_lora& lora, const float* thin, const Dropout& mask, int64_t col,
                  int64_t columns, const Scratch& scratch, float* sums) const {
        if (!ranks(lora)) return;
        const Factor a = factor_of(lora.a, s.expert);
        if (!mask.on) return wide(s, thin, ranks(lora), lora.scale, a, col, columns, scratch, sums);
        clear(scratch.more, s.count);
        wide(s, thin, ranks(lora), lora.scale, a, col, columns, scratch, scratch.more);
        const int64_t width = columns - col < STRIPE ? columns - col : STRIPE;
        mask_rows(s, col, col + width, &mask, scratch.more, STRIPE);
        for (int64_t i = 0; i < s.count * STRIPE; ++i) sums[i] += scratch.more[i];
    }

    // Row by row instead of piece by piece, so that each row is read and written contiguously.
    void derive(const Segment& s, int64_t first, int64_t count, const Scratch& scratch) const {
        Columns pieces[BLOCKS];
        for (int64_t k = 0; k < count; ++k) pieces[k] = piece(first + k, down_span);
        const int64_t begin = pieces[0].begin,
                      bytes = (pieces[count - 1].begin + pieces[count - 1].width - begin) * (bf16 ? 2 : 4);
        for (int64_t i = 0; i < s.count; ++i) {
            const int64_t next_route = grouping.order[s.begin + (i + 2 < s.count ? i + 2 : s.count - 1)];
            fetch_row(hidden(args.g).at(next_route, begin), bytes),
                fetch_row(hidden(args.u).at(next_route, begin), bytes);
            for (int64_t k = 0; k < count; ++k)
                derive(s, pieces[k], first + k, i, block(scratch, k * down_span / STRIPE));
        }
    }

    // From v of a row: its term of dw, h, dg and du.
    void derive(const Segment& s, const Columns& c, int64_t at, int64_t i, const float* sums) const {
        const Activation act{args.activation, static_cast<float>(args.alpha), static_cast<float>(args.limit)};
        const int64_t place = s.begin + i, route = grouping.order[place];
        const Floats w = all(weight_at(args, route));
        alignas(64) float g[STRIPE] = {}, u[STRIPE] = {}, out[3][STRIPE];
        Floats part = zero();
        float rest = 0;
        for (int64_t from = 0; from < c.width; from += STRIPE) {
            const int64_t width = c.width - from < STRIPE ? c.width - from : STRIPE;
            const float* v = sums + from / STRIPE * ROWS * STRIPE + i * STRIPE;
            read(hidden(args.g).at(route, c.begin + from), bf16, width, g);
            read(hidden(args.u).at(route, c.begin + from), bf16, width, u);
            for (int j = 0; j < STRIPE; j += LANES) {
                const auto results = act.gradients(load(g + j), load(u + j), w * load(v + j));
                store(out[0] + j, results.h), store(out[1] + j, results.dg), store(out[2] + j, results.du);
            }
            int64_t j = 0;
            for (; j + LANES <= width; j += LANES) part = fma(load(v + j), load(out[0] + j), part);
            for (; j < width; ++j) rest += v[j] * out[0][j];
            write_inner(h, place, c.begin + from, width, out[0]);
            write_inner(dg, place, c.begin + from, width, out[1]);
            write_inner(du, place, c.begin + from, width, out[2]);
        }
        parts.data()[place * inner_pieces + at] = total_of(part) + rest;
    }

    void write_weight_gradients() {
        const Factor out = matrix_of(args.dweights);
        for (int64_t route = 0; route < args.tokens * slots; ++route)
            if (id_at(args, route) < 0) out.put(route / slots, route % slots, 0);
        parallel_for(grouping.segment_count, [&](int64_t item, int) {
            const Segment& s = grouping.segments[item];
            for (int64_t i = 0; i < s.count; ++i) {
                const int64_t route = grouping.order[s.begin + i];
                float total = 0;
                for (int64_t k = 0; k < inner_pieces; ++k) total += parts.data()[(s.begin + i) * inner_pieces + k];
                if (given(args.down_bias)) total += dot_bias(args, dy, s.expert, route);
                out.put(route / slots, route % slots, total);
            }
        });
    }

    // Computes `count` panels of gate_span columns of dx from panel `first` on; results: [routes of the chunk][columns]
    void write_dx(const Chunk& chunk, int64_t first, int64_t count, const NextItem& later, const Scratch& scratch,
                  int worker, float* results) {
        const int64_t stripes = count * gate_span / STRIPE, all = count * gate_span, col = first * gate_span;
        const int64_t width = outer - col < all ? outer - col : all;
        const Dropout gate = dropout_of(args, GATE), up = dropout_of(args, UP);
        for (int64_t at = chunk.first; at < chunk.last; ++at) {
            const Segment& s = grouping.parts[at];
            for (int64_t i = 0; i < stripes; ++i) clear(block(scratch, i), s.count);
            const NextItem after = at + 1 < chunk.last ? NextItem{grouping.parts[at + 1].expert, first} : later;
            for (int64_t i = 0; i < args.slice_count; ++i) {
                const gs_slice &slice = args.slices[i], &next = args.slices[i + 1 < args.slice_count ? i + 1 : 0];
                add_slice(s, slice, slice.gate, places(dg), col, count, {&slice.up, s.expert, 0, slice.up.rows, col},
                          scratch, worker);
                add_slice(s, slice, slice.up, places(du), col, count,
                          {&next.gate, i + 1 < args.slice_count ? s.expert : after.expert, 0, next.gate.rows,
                           i + 1 < args.slice_count ? col : after.first * gate_span},
                          scratch, worker);
            }
            const gs_matrix& any = args.slices[0].gate;  // up's format is the same
            for (int64_t i = 0; i < count && !(few_back(s) && packed(any)); ++i)
                order_inputs(any, s, block(scratch, i * gate_span / STRIPE));
            for (int64_t i = 0; i < stripes && i * STRIPE < width; ++i) {
                add_lora(s, args.gate, dg_gate.data(), gate, col + i * STRIPE, outer, scratch, block(scratch, i));
                add_lora(s, args.up, du_up.data(), up, col + i * STRIPE, outer, scratch, block(scratch, i));
            }
            scatter_rows(grouping, s, chunk.begin * slots, stripes, scratch, results);
        }
        alignas(64) float total[BLOCKS * STRIPE];
        for (int64_t t = chunk.begin; t < chunk.end; ++t) {
            std::memset(total, 0, sizeof total);
            for (int64_t route = t * slots; route < (t + 1) * slots; ++route) {
                if (id_at(args, route) < 0) continue;
                const float* row = results + (route - chunk.begin * slots) * all;
                for (int64_t j = 0; j < all; j += LANES) store(total + j, load(total + j) + load(row + j));
            }
            write(static_cast<char*>(args.dx.data) + (t * outer + col) * (bf16 ? 2 : 4), bf16, width, total);
        }
    }

    // sums += d W, for gate or up of a slice; `after`: the weights that are multiplied next
    void add_slice(const Segment& s, const gs_slice& slice, const gs_matrix& m, const Rows& d, int64_t col,
                   int64_t count, const Next& after, const Scratch& scratch, int worker) const {
        if (few_back(s) && packed(m)) {
            const FloatLines lines = lay_few_floats(d, nullptr, s, slice.begin, slice.end - slice.begin, worker);
            for (int64_t i = 0; i < count; ++i)
                add_few_inputs(m, s.expert, col + i * gate_span, lines, s.count, ROWS * STRIPE, scratch.stripes,
                               block(scratch, i * gate_span / STRIPE));
            return;
        }
        for (int64_t k = 0, size = slice.end - slice.begin; k < size; k += DEPTH) {
            const int64_t end = k + DEPTH < size ? k + DEPTH : size;
            const Left left = lay_places(d, s, slice.begin + k, slice.begin + end, m, scratch);
            for (int64_t i = 0; i < count; ++i) {
                const bool more = i + 1 < count;
                const Next here{&m, s.expert, more ? k : end, size, col + (more ? i + 1 : 0) * gate_span};
                add_inputs(m, s, k, end, col + i * gate_span, left, scratch, block(scratch, i * gate_span / STRIPE),
                           more || end < size ? here : after);
            }
        }
    }

    void write_sums() {
        const Dropout masks[] = {dropout_of(args, GATE), dropout_of(args, UP), dropout_of(args, DOWN)};
        const Side tokens{x, true}, gradient{dy, true}, weighed{dy, true, true};
        const Side hs{places(h), false}, dgs{places(dg), false}, dus{places(du), false};
        Sums sums(*this);
        sums.lora(args.gate.da, false, dg_gate.data(), false, tokens, &masks[GATE], args.gate.scale);
        sums.lora(args.up.da, false, du_up.data(), false, tokens, &masks[UP], args.up.scale);
        sums.lora(args.down.da, false, dy_down.data(), true, hs, &masks[DOWN], args.down.scale);
        sums.lora(args.gate.db, true, x_gate.data(), false, dgs, nullptr, args.gate.scale);
        sums.lora(args.up.db, true, x_up.data(), false, dus, nullptr, args.up.scale);
        sums.lora(args.down.db, true, h_down.data(), true, gradient, nullptr, args.down.scale);
        sums.weights(args.dgate_up, 0, dgs, tokens);
        sums.weights(args.dgate_up, inner, dus, tokens);
        sums.weights(args.ddown, 0, weighed, hs);
        sums.bias(args.dgate_up_bias, 0, dgs);
        sums.bias(args.dgate_up_bias, inner, dus);
        sums.bias(args.ddown_bias, 0, weighed);
    }
};

}  // namespace gs::GS_LEVEL
