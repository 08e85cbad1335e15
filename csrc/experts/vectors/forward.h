// y[t] = sum_j w[t,j] (Wd act(Wg x + ..., Wu x + ...) + ...), in four phases:
//   thin    A_gate x and A_up x
//   hidden  g, u and h, 32 features of a segment's routes at a time
//   thin    A_down h
//   output  32 features of y for a chunk of tokens: the rows of its routes, then their sums in the order of the slots.
//           With few routes, rows and sums are two phases: then each item reads a long run of one expert's weights
#pragma once

#include "../few_rows/integer_rows.h"
#include "../int8/products.h"

namespace gs::GS_LEVEL {

struct Forward : Call {
    const int64_t panels;                          // panels of y
    const int64_t pieces_at_once, panels_at_once;  // pieces and panels of 32 that one item computes
    const bool decoding;                           // all segments are few
    const Region<float> gate_thin, up_thin, down_thin, rows;
    const Region<char> h;  // [places, I] in x's dtype
    const Region<uint8_t> bad;
    const Int8Products int8;
    const FewIntegers few_int8;

    Forward(const gs_moe_args& a, const Grouping& p)
        : Call(a, p),
          panels((outer + STRIPE - 1) / STRIPE),
          pieces_at_once(together(p.segment_count * pieces(STRIPE), BLOCKS / 2, all_few(p) ? 16 : 2)),
          panels_at_once(all_few(p) ? together(p.segment_count * panels, PANELS, 16)
                                    : together(p.chunk_count * panels, PANELS)),
          decoding(all_few(p)),
          gate_thin(arena.shared<float>(p.routes * ranks(a.gate))),
          up_thin(arena.shared<float>(p.routes * ranks(a.up))),
          down_thin(arena.shared<float>(p.routes * ranks(a.down))),
          rows(decoding ? arena.shared<float>(a.tokens * slots * panels * STRIPE)
                        : arena.each<float>(p.chunk_routes * STRIPE * panels_at_once)),
          h(inner_rows()),
          bad(arena.shared<uint8_t>(given(a.flags) ? groups() * a.tokens * slots : 0)),
          int8(*this),
          few_int8(*this) {
        arena.allocate();
    }

    void run() {
        skipped();
        for (const gs_tensor* t : {&args.g, &args.u})
            if (given(*t))
                prefer_huge_pages(t->data, static_cast<size_t>(args.tokens * slots * inner) * (bf16 ? 2 : 4));
        fill_sheet(x, false);
        first_thin();
        if (int8.on()) int8.round_x();
        if (few_int8.on()) few_int8.round_x();
        const int64_t all = pieces(STRIPE), items = (all + pieces_at_once - 1) / pieces_at_once;
        parallel_for(grouping.segment_count * items, [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t first = item % items * pieces_at_once, left = all - first;
            hidden(grouping.segments[item / items], first, left < pieces_at_once ? left : pieces_at_once,
                   after_segment(item, items, pieces_at_once), scratch(worker), worker);
        });
        const Rows hs = places(h);
        if (int8.on()) int8.round_h(hs);
        if (few_int8.on()) few_int8.round_h(hs);
        const Dropout mask = dropout_of(args, DOWN);
        if (ranks(args.down))
            parallel_for(grouping.segment_count, [&](int64_t item, int worker) {
                const Segment& s = grouping.segments[item];
                thin(
                    s, inner, transposed(factor_of(args.down.a, s.expert)), ranks(args.down),
                    [&](int64_t k, int64_t end, float* left) { gather_places(hs, s, k, end, &mask, left); },
                    scratch(worker), down_thin.data());
            });
        decoding ? few_outputs() : outputs();
        if (given(args.flags)) join_flags();
        arena.check();
    }

private:
    void outputs() {
        parallel_for(grouping.chunk_count * groups(), [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t first = item % groups() * panels_at_once, left = panels - first;
            output(grouping.chunks[item / groups()], first, left < panels_at_once ? left : panels_at_once,
                   after_chunk(item, groups(), panels_at_once), scratch(worker), worker, rows.data(worker));
        });
    }

    void few_outputs() {
        parallel_for(grouping.segment_count * groups(), [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t first = item % groups() * panels_at_once, left = panels - first;
            few_output(grouping.segments[item / groups()], first, left < panels_at_once ? left : panels_at_once,
                       after_segment(item, groups(), panels_at_once), scratch(worker), worker);
        });
        const auto finish_panels = [&](int64_t item, int) {
            const Chunk& chunk = grouping.chunks[item / groups()];
            const int64_t first = item % groups() * panels_at_once, left = panels - first;
            write_results(chunk, first, left < panels_at_once ? left : panels_at_once,
                          rows.data() + chunk.begin * slots * panels * STRIPE + first * STRIPE, panels * STRIPE);
        };
        const int64_t items = grouping.chunk_count * groups();
        constexpr int64_t alone = 1 << 15;  // sums of 2 us: others would take as long to begin
        if (args.tokens * slots * outer > alone) return parallel_for(items, finish_panels);
        for (int64_t item = 0; item < items; ++item) finish_panels(item, 0);
    }

    int64_t groups() const { return (panels + panels_at_once - 1) / panels_at_once; }  // groups of panels

    // Zeroes the saved rows of skipped slots: they are never used, but they are outputs.
    void skipped() const {
        const size_t bytes = static_cast<size_t>(inner) * (bf16 ? 2 : 4);
        if (!given(args.g) || grouping.routes == args.tokens * slots) return;
        for (int64_t route = 0; route < args.tokens * slots; ++route)
            if (id_at(args, route) < 0)
                for (const gs_tensor* t : {&args.g, &args.u})
                    std::memset(place(static_cast<char*>(t->data), route, 0), 0, bytes);
    }

    void first_thin() {
        if (!ranks(args.gate) && !ranks(args.up)) return;
        const gs_lora* loras[] = {&args.gate, &args.up};
        float* const outs[] = {gate_thin.data(), up_thin.data()};
        if (thin_together())
            return parallel_for(grouping.segment_count, [&](int64_t item, int worker) {
                thin_x(grouping.segments[item], scratch(worker), outs);
            });
        parallel_for(2 * grouping.segment_count, [&](int64_t item, int worker) {
            const gs_lora& lora = *loras[item % 2];
            if (!ranks(lora)) return;
            const Segment& s = grouping.segments[item / 2];
            const Dropout mask = dropout_of(args, item % 2 ? UP : GATE);
            thin(
                s, outer, transposed(factor_of(lora.a, s.expert)), ranks(lora),
                [&](int64_t k, int64_t end, float* left) { gather_routes(x, s, k, end, &mask, left); }, scratch(worker),
                outs[item % 2]);
        });
    }

    // Computes g, u and h for `count` pieces of 32 features from piece `first` on.
    void hidden(const Segment& s, int64_t first, int64_t count, const NextItem& after, const Scratch& scratch,
                int worker) {
        for (int64_t i = 0; i < 2 * count; ++i) clear(block(scratch, i), s.count);
        if (few(s) && !int8.on()) add_few_hidden(s, first, count, after, scratch, worker);
        const int64_t step = step_of(args.slices[0].gate);
        const auto reach = [&](int64_t k) { return k + step < outer ? k + step : outer; };
        // the weights after those of up in piece i and inputs from k on
        const auto ahead_of = [&](int64_t k, int64_t i) {
            const bool more = i + 1 < count, last = !more && k + step >= outer;
            const int64_t expert = last ? after.expert : s.expert, from = more ? k : last ? 0 : k + step;
            const Columns c = piece(more ? first + i + 1 : last ? after.first : first, STRIPE);
            return outputs_ahead(args.slices[c.slice].gate, expert, c.first, from, reach(from));
        };
        for (int64_t k = int8.on() || few(s) ? outer : 0; k < outer; k += step) {
            const int64_t end = reach(k);
            const Left left = lay_routes(x, s, k, end, args.slices[0].gate, scratch);
            for (int64_t i = 0; i < count; ++i) {
                const Columns c = piece(first + i, STRIPE);
                const gs_slice& slice = args.slices[c.slice];
                add_outputs(slice.gate, s, c.first, k, end, left, scratch, block(scratch, 2 * i),
                            outputs_ahead(slice.up, s.expert, c.first, k, end));
                add_outputs(slice.up, s, c.first, k, end, left, scratch, block(scratch, 2 * i + 1), ahead_of(k, i));
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            const Columns c = piece(first + i, STRIPE);
            float *g = block(scratch, 2 * i), *u = block(scratch, 2 * i + 1);
            if (int8.on()) int8.gate_and_up(s, args.slices[c.slice], c.first, worker, g, u);
            if (ranks(args.gate))
                wide(s, gate_thin.data(), ranks(args.gate), args.gate.scale,
                     transposed(factor_of(args.gate.b, s.expert)), c.begin, inner, scratch, g);
            if (ranks(args.up))
                wide(s, up_thin.data(), ranks(args.up), args.up.scale, transposed(factor_of(args.up.b, s.expert)),
                     c.begin, inner, scratch, u);
        }
        activate(s, first, count, scratch);
    }

    // One matrix after the other, because each is contiguous.
    void add_few_hidden(const Segment& s, int64_t first, int64_t count, const NextItem& after, const Scratch& scratch,
                        int worker) const {
        const Columns begin = piece(first, STRIPE);
        fetch_few(args.slices[begin.slice].gate, s.expert, begin.first);
        const FewRows rows_of_x = few_x(s, worker);
        for (int64_t part = 0; part < 2; ++part)
            for (int64_t i = 0; i < count; ++i) {
                const Columns c = piece(first + i, STRIPE);
                const gs_slice& slice = args.slices[c.slice];
                const char* next = i + 1 < count ? few_feature(part, s.expert, first + i + 1)
                                   : part == 0   ? few_feature(1, s.expert, first)
                                                 : few_feature(0, after.expert, after.first);
                add_few_rows(part ? slice.up : slice.gate, s, c.first, rows_of_x, next, block(scratch, 2 * i + part));
            }
    }

    FewRows few_x(const Segment& s, int worker) const {
        if (few_int8.on()) return few_int8.rows_of_x(s);
        return {lay_few(x, grouping.order + s.begin, s, 0, args.slices[0].gate, worker)};
    }
    FewRows few_h(const Segment& s, int64_t slice, const Rows& hs, int worker) const {
        if (few_int8.on()) return few_int8.rows_of_h(s, slice);
        return {lay_few(hs, nullptr, s, args.slices[slice].begin, args.slices[slice].down, worker)};
    }

    // The first panel of a piece of gate (0) or up (1).
    const char* few_feature(int64_t part, int64_t expert, int64_t at) const {
        const Columns c = piece(at, STRIPE);
        const gs_slice& slice = args.slices[c.slice];
        return few_panel(part ? slice.up : slice.gate, expert, c.first);
    }

    // Row by row instead of piece by piece, so that each row is written contiguously.
    void activate(const Segment& s, int64_t first, int64_t count, const Scratch& scratch) const {
        Columns pieces[BLOCKS / 2];
        for (int64_t k = 0; k < count; ++k) pieces[k] = piece(first + k, STRIPE);
        const int64_t begin = pieces[0].begin, end = pieces[count - 1].begin + pieces[count - 1].width;
        for (int64_t i = 0; i < s.count; ++i) {
            const int64_t next_route = grouping.order[s.begin + (i + 2 < s.count ? i + 2 : s.count - 1)];
            for (const gs_tensor* t : {&args.g, &args.u})
                if (given(*t))
                    fetch_row(place(static_cast<char*>(t->data), next_route, begin), (end - begin) * (bf16 ? 2 : 4));
            for (int64_t k = 0; k < count; ++k)
                activate_row(s, pieces[k], i, block(scratch, 2 * k) + i * STRIPE,
                             block(scratch, 2 * k + 1) + i * STRIPE);
        }
    }

    void activate_row(const Segment& s, const Columns& c, int64_t i, float* g, float* u) const {
        const Activation act{args.activation, static_cast<float>(args.alpha), static_cast<float>(args.limit)};
        const Factor bias = matrix_of(args.gate_up_bias);
        alignas(64) float values[STRIPE];
        if (given(args.gate_up_bias))
            for (int64_t j = 0; j < c.width; ++j)
                g[j] += bias.at(s.expert, c.begin + j), u[j] += bias.at(s.expert, inner + c.begin + j);
        const int64_t route = grouping.order[s.begin + i];
        if (bf16) {  // the backward uses the saved (rounded) values, so h does, too
            round_row(g), round_row(u);
        }
        if (given(args.g)) {
            write(place(static_cast<char*>(args.g.data), route, c.begin), bf16, c.width, g);
            write(place(static_cast<char*>(args.u.data), route, c.begin), bf16, c.width, u);
        }
        for (int j = 0; j < STRIPE; j += LANES) store(values + j, act.value(load(g + j), load(u + j)));
        write_inner(h, s.begin + i, c.begin, c.width, values);
    }

    static void round_row(float* values) {
        for (int j = 0; j < STRIPE; j += LANES) store(values + j, through_bfloat16(load(values + j)));
    }

    char* place(char* data, int64_t row, int64_t column) const {
        return data + (row * inner + column) * (bf16 ? 2 : 4);
    }

    // Computes `count` panels of 32 features of y from panel `first` on; results: [routes of the chunk][features]
    void output(const Chunk& chunk, int64_t first, int64_t count, const NextItem& later, const Scratch& scratch,
                int worker, float* results) {
        const Rows hs = places(h);
        const int64_t col = first * STRIPE;
        for (int64_t at = chunk.first; at < chunk.last; ++at) {
            const Segment& s = grouping.parts[at];
            if (at + 1 < chunk.last && few(grouping.parts[at + 1]))
                fetch_few(args.slices[0].down, grouping.parts[at + 1].expert, col);
            for (int64_t i = 0; i < count; ++i) clear(block(scratch, i), s.count);
            const NextItem after = at + 1 < chunk.last ? NextItem{grouping.parts[at + 1].expert, first} : later;
            for (int64_t i = 0; i < args.slice_count; ++i) add_slice(s, after, i, hs, first, count, scratch, worker);
            for (int64_t i = 0; i < count; ++i) finish(s, (first + i) * STRIPE, scratch, block(scratch, i));
            scatter_rows(grouping, s, chunk.begin * slots, count, scratch, results);
        }
        write_results(chunk, first, count, results, count * STRIPE);
    }

    // The same for a segment, whose rows are kept for the sums.
    void few_output(const Segment& s, int64_t first, int64_t count, const NextItem& later, const Scratch& scratch,
                    int worker) {
        const Rows hs = places(h);
        for (int64_t i = 0; i < count; ++i) clear(block(scratch, i), s.count);
        for (int64_t i = 0; i < args.slice_count; ++i) add_slice(s, later, i, hs, first, count, scratch, worker);
        for (int64_t i = 0; i < count; ++i) finish(s, (first + i) * STRIPE, scratch, block(scratch, i));
        for (int64_t i = 0; i < s.count; ++i) {
            float* row = rows.data() + (grouping.order[s.begin + i] * panels + first) * STRIPE;
            for (int64_t k = 0; k < count; ++k)
                std::memcpy(row + k * STRIPE, block(scratch, k) + i * STRIPE, STRIPE * 4);
        }
    }

    void add_slice(const Segment& s, const NextItem& after, int64_t index, const Rows& hs, int64_t first, int64_t count,
                   const Scratch& scratch, int worker) {
        const gs_slice& slice = args.slices[index];
        if (int8.on()) {
            for (int64_t i = 0; i < count; ++i) {
                const bool last = i + 1 == count;
                int8.down(s, index, (first + i) * STRIPE, last ? after.expert : s.expert,
                          (last ? after.first : first + i + 1) * STRIPE, worker, block(scratch, i));
            }
            return;
        }
        if (few(s)) {
            const FewRows rows_of_h = few_h(s, index, hs, worker);
            for (int64_t i = 0; i < count; ++i) {
                const bool last = index + 1 == args.slice_count;
                const char* next = i + 1 < count ? few_panel(slice.down, s.expert, (first + i + 1) * STRIPE)
                                   : last        ? few_panel(args.slices[0].down, after.expert, after.first * STRIPE)
                                                 : few_panel(args.slices[index + 1].down, s.expert, first * STRIPE);
                add_few_rows(slice.down, s, (first + i) * STRIPE, rows_of_h, next, block(scratch, i));
            }
            return;
        }
        const int64_t step = step_of(slice.down), size = slice.end - slice.begin;
        const auto reach = [&](int64_t k) { return k + step < size ? k + step : size; };
        // the weights after panel i and inputs from k on; for the next slice, the positions are those of this slice
        const auto ahead_of = [&](int64_t k, int64_t i) {
            const bool more = i + 1 < count, last = !more && k + step >= size;
            const int64_t expert = last ? after.expert : s.expert, from = more ? k : last ? 0 : k + step;
            const int64_t panel = more ? first + i + 1 : last ? after.first : first;
            return outputs_ahead(slice.down, expert, panel * STRIPE, from, reach(from));
        };
        for (int64_t k = 0; k < size; k += step) {
            const Left left = lay_places(hs, s, slice.begin + k, slice.begin + reach(k), slice.down, scratch);
            for (int64_t i = 0; i < count; ++i)
                add_outputs(slice.down, s, (first + i) * STRIPE, k, reach(k), left, scratch, block(scratch, i),
                            ahead_of(k, i));
        }
    }

    // Adds LoRA and bias.
    void finish(const Segment& s, int64_t col, const Scratch& scratch, float* sums) const {
        const int64_t width = outer - col < STRIPE ? outer - col : STRIPE;
        if (ranks(args.down))
            wide(s, down_thin.data(), ranks(args.down), args.down.scale, transposed(factor_of(args.down.b, s.expert)),
                 col, outer, scratch, sums);
        if (!given(args.down_bias)) return;
        for (int64_t i = 0; i < s.count; ++i)
            for (int64_t j = 0; j < width; ++j) sums[i * STRIPE + j] += matrix_of(args.down_bias).at(s.expert, col + j);
    }

    // Writes y, or a row for each slot, from the rows of a chunk's routes: `results` is the first one, `stride` floats
    // before the next, from panel `first` on.
    void write_results(const Chunk& chunk, int64_t first, int64_t count, float* results, int64_t stride) const {
        const int64_t all_columns = count * STRIPE, col = first * STRIPE;
        const int64_t width = outer - col < all_columns ? outer - col : all_columns;
        if (given(args.rows))
            write_rows(chunk, first / panels_at_once, col, width, all_columns, results, stride);
        else
            write_sums(chunk, col, width, all_columns, results, stride);
    }

    void write_sums(const Chunk& chunk, int64_t col, int64_t width, int64_t all_columns, const float* results,
                    int64_t stride) const {
        alignas(64) float total[PANELS * STRIPE];
        for (int64_t t = chunk.begin; t < chunk.end; ++t) {
            std::memset(total, 0, static_cast<size_t>(all_columns) * 4);
            for (int64_t route = t * slots; route < (t + 1) * slots; ++route) {
                if (id_at(args, route) < 0) continue;
                const float* row = results + (route - chunk.begin * slots) * stride;
                const Floats w = all(weight_at(args, route));
                for (int64_t j = 0; j < all_columns; j += LANES)
                    store(total + j, fma(w, load(row + j), load(total + j)));
            }
            write(static_cast<char*>(args.y.data) + (t * outer + col) * (bf16 ? 2 : 4), bf16, width, total);
        }
    }

    void write_rows(const Chunk& chunk, int64_t group, int64_t col, int64_t width, int64_t all_columns, float* results,
                    int64_t stride) const {
        for (int64_t route = chunk.begin * slots; route < chunk.end * slots; ++route) {
            float* row = results + (route - chunk.begin * slots) * stride;
            if (id_at(args, route) < 0) std::memset(row, 0, static_cast<size_t>(all_columns) * 4);
            write(static_cast<char*>(args.rows.data) + (route * outer + col) * 4, false, width, row);
            if (!given(args.flags)) continue;
            bad.data()[group * args.tokens * slots + route] = !all_finite(row, width);
        }
    }

    void join_flags() const {
        const int64_t routes = args.tokens * slots;
        auto* flags = static_cast<uint8_t*>(args.flags.data);
        for (int64_t route = 0; route < routes; ++route) {
            flags[route] = 0;
            for (int64_t group = 0; group < groups(); ++group) flags[route] |= bad.data()[group * routes + route];
        }
    }
};

}  // namespace gs::GS_LEVEL
