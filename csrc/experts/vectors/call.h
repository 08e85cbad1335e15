// The state of one call (sizes and scratch), and the steps that its phases share.
//
// A phase is a list of items that any worker may take. One item computes each output completely and in a fixed order,
// so neither the number of threads nor their schedule changes a bit.
#pragma once

#include "../../arena.h"
#include "../../pool.h"
#include "scratch.h"

namespace gs::GS_LEVEL {

struct Call {
    const gs_moe_args& args;
    const Grouping& grouping;
    const int64_t outer, inner, slots;  // H, I, k
    const bool bf16, tiled;             // tiled: products read rows in place instead of gathering them
    const Rows x;
    Arena arena;

    Call(const gs_moe_args& a, const Grouping& p)
        : args(a),
          grouping(p),
          outer(a.hidden),
          inner(a.intermediate),
          slots(a.slots),
          bf16(a.x.dtype == GS_BF16),
          tiled(HAS_TILES && bf16 && !a.int8 && aligned(a)),
          x(rows_of(a.x, a.hidden, a.slots)),
          left_(arena.each<float>(ROWS * LEFT_STRIDE)),
          stripes_(arena.each<float>(STRIPES * DEPTH * STRIPE)),
          sums_(arena.each<float>(BLOCKS * ROWS * STRIPE)),
          more_(arena.each<float>(ROWS * STRIPE)),
          words_(arena.each<uint32_t>(HAS_PAIRS ? DEPTH / 2 * STRIPE : 0)),
          sheet_(arena.shared<char>(tiled ? (p.routes + 16) * sheet_columns(outer) * 2 : 0)),
          lines_(arena.each<float>(any_few(p) ? MOST_FEW * longest() : 0)) {}

    int64_t ranks(const gs_lora& lora) const { return given(lora.a) ? lora.a.sizes[1] : 0; }

    Scratch scratch(int worker) const {
        return {left_.data(worker), stripes_.data(worker), sums_.data(worker), more_.data(worker), words_.data(worker)};
    }

    // The number of pieces of `width` intermediate features, slice by slice.
    int64_t pieces(int64_t width) const {
        int64_t count = 0;
        for (int64_t s = 0; s < args.slice_count; ++s)
            count += (args.slices[s].end - args.slices[s].begin + width - 1) / width;
        return count;
    }
    Columns piece(int64_t at, int64_t width) const {
        for (int64_t s = 0;; ++s) {
            const int64_t size = args.slices[s].end - args.slices[s].begin, here = (size + width - 1) / width;
            if (at < here)
                return {s, at * width, size - at * width < width ? size - at * width : width,
                        args.slices[s].begin + at * width};
            at -= here;
        }
    }

    // scratch.left = the segment's rows of a tensor indexed by route, with dropout
    void gather_routes(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const Dropout* mask,
                       float* left) const {
        gather(rows, grouping.order + s.begin, s.count, begin, end, left);
        mask_rows(s, begin, end, mask, left, LEFT_STRIDE);
    }

    // The same for a tensor in the order of the groups.
    void gather_places(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const Dropout* mask,
                       float* left) const {
        gather_run(rows, s.begin, s.count, begin, end, left);
        mask_rows(s, begin, end, mask, left, LEFT_STRIDE);
    }

    void mask_rows(const Segment& s, int64_t begin, int64_t end, const Dropout* mask, float* rows,
                   int64_t stride) const {
        if (!mask || !mask->on) return;
        for (int64_t i = 0; i < s.count; ++i) {
            const int64_t route = grouping.order[s.begin + i];
            drop(*mask, route / slots, route % slots, begin, end, rows + i * stride);
        }
    }

    // Whether products with this matrix use pairs of bfloat16.
    bool paired(const gs_matrix& m) const { return HAS_PAIRS && bf16 && cuts(m) > 0; }

    // Inputs per step of a sum. Each step reads and writes the sums once; steps are longer if nothing is copied.
    int64_t step_of(const gs_matrix& m) const { return tiled && m.format == GS_PACKED_BF16 ? 2 * DEPTH : DEPTH; }

    // Memory for inner rows in the order of the groups, in the form that products read; for tiles, with zeros after the
    // last column.
    int64_t inner_stride() const { return tiled ? sheet_columns(inner) : inner; }
    Region<char> inner_rows() { return arena.shared<char>((grouping.routes + 16) * inner_stride() * (bf16 ? 2 : 4)); }
    Rows places(const Region<char>& region) const { return {region.data(), inner, inner_stride(), 1, bf16}; }
    void write_inner(const Region<char>& region, int64_t place, int64_t column, int64_t width,
                     const float* values) const {
        const int64_t bytes = bf16 ? 2 : 4;
        char* row = region.data() + place * inner_stride() * bytes;
        write(row + column * bytes, bf16, width, values);
        if (column + width == inner)
            std::memset(row + inner * bytes, 0, static_cast<size_t>((inner_stride() - inner) * bytes));
    }

    // Gathers the rows of all routes in the order of the groups, for products of tiles; few_too: also segments of few
    // rows.
    void fill_sheet(const Rows& rows, bool few_too) const {
        if (!tiled || (!few_too && all_few(grouping))) return;
        parallel_for(grouping.segment_count, [&](int64_t item, int) {
            const Segment& s = grouping.segments[item];
            if (!few_too && few(s)) return;
            const int64_t bytes = 2 * outer, all = 2 * sheet_columns(outer);
            for (int64_t i = s.begin; i < s.begin + s.count; ++i) {
                char* row = sheet_.data() + i * all;
                std::memcpy(row, rows.at(grouping.order[i], 0), static_cast<size_t>(bytes));
                std::memset(row + bytes, 0, static_cast<size_t>(all - bytes));
            }
        });
    }

    // Columns [begin, end) of a segment's rows for the left side of a product, as floats or in their dtype. For rows by
    // token:
    Left lay_routes(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const gs_matrix& m,
                    const Scratch& scratch) const {
        if (tiled && paired(m)) return sheet(sheet_.data(), sheet_columns(outer), s, begin);
        return lay(rows, grouping.order + s.begin, 0, s.count, begin, end, m, scratch);
    }
    // For rows in the order of the groups:
    Left lay_places(const Rows& rows, const Segment& s, int64_t begin, int64_t end, const gs_matrix& m,
                    const Scratch& scratch) const {
        if (tiled && paired(m)) return sheet(rows.data, rows.stride, s, begin);
        return lay(rows, nullptr, s.begin, s.count, begin, end, m, scratch);
    }

    // Whether a segment has so few rows that codes are multiplied as they arrive from memory.
    static bool few(const Segment& s) { return s.count <= MOST_FEW; }
    // The same for the products of a backward, which keep their sums in memory.
    static bool few_back(const Segment& s) { return s.count <= FEW; }

    static bool all_few(const Grouping& p) {
        for (int64_t i = 0; i < p.segment_count; ++i)
            if (!few(p.segments[i])) return false;
        return true;
    }

    // A segment's rows for add_few, columns [begin, begin + m.cols): in place if add_few can read them, else copies.
    // Rows by token, or, without a list, in the order of the groups.
    Lines lay_few(const Rows& rows, const int64_t* list, const Segment& s, int64_t begin, const gs_matrix& m,
                  int worker) const {
        Lines lines{{}, lines_of_pairs(m.format, bf16)};
        const int64_t word = m.format == GS_PACKED_BF16 ? 2 : m.format == GS_INT8 || m.format == GS_FP8_BLOCK ? 4 : 1;
        const bool as_is = bf16 == lines.pairs && m.cols % word == 0;
        for (int64_t i = 0; i < s.count; ++i) {
            const char* row = rows.at(list ? list[i] : s.begin + i, begin);
            float* copy = lines_.data(worker) + i * longest();
            lines.row[i] = as_is ? static_cast<const void*>(row) : copy;
            if (as_is) continue;
            if (lines.pairs) {
                std::memcpy(copy, row, static_cast<size_t>(m.cols) * 2);
                std::memset(reinterpret_cast<char*>(copy) + 2 * m.cols, 0, 8);
            } else {
                read(row, bf16, m.cols, copy);
                std::memset(copy + m.cols, 0, 16);
            }
        }
        return lines;
    }

    // The same for add_few_inputs, columns [begin, begin + count).
    FloatLines lay_few_floats(const Rows& rows, const int64_t* list, const Segment& s, int64_t begin, int64_t count,
                              int worker) const {
        FloatLines lines{};
        for (int64_t i = 0; i < s.count; ++i) {
            float* copy = lines_.data(worker) + i * longest();
            read(rows.at(list ? list[i] : s.begin + i, begin), bf16, count, copy);
            std::memset(copy + count, 0, 64);
            lines.row[i] = copy;
        }
        return lines;
    }

    // sums += left W^T over inputs [begin, end), 32 outputs from `row` on
    void add_outputs(const gs_matrix& m, const Segment& s, int64_t row, int64_t begin, int64_t end, const Left& left,
                     const Scratch& scratch, float* sums, const Upcoming& ahead) const {
        with_code(m.format, [&](auto code) {
            using Code = decltype(code);
            if constexpr (HAS_PAIRS && Code::per_word == 2) {
                if (bf16)
                    return multiply_pairs(left, s.count,
                                          outputs_pairs<Code>(m, s.expert, row, begin, end, scratch.words), end - begin,
                                          sums);
            }
            if constexpr (FUSED<Code>)
                if (!paired(m) && row + 16 < m.rows)
                    return multiply_fused<Code>(m, s.expert, row, begin, end, static_cast<const float*>(left.rows),
                                                s.count, scratch.stripes, sums, ahead);
            outputs_stripe<Code>(m, s.expert, row, begin, end, !paired(m), scratch.stripes);
            multiply_stripe(m, left, s.count, scratch.stripes, end - begin, scratch, sums, ahead);
        });
    }

    // sums[i] += left W over outputs [begin, end), block i of 32 of the `span` inputs from `col` on. The sums have the
    // order of inputs_stripes until order_inputs reorders them.
    void add_inputs(const gs_matrix& m, const Segment& s, int64_t begin, int64_t end, int64_t col, const Left& left,
                    const Scratch& scratch, float* sums, const Next& next) const {
        with_code(m.format, [&](auto code) {
            using Code = decltype(code);
            if constexpr (HAS_PAIRS && Code::per_word == 2) {
                if (bf16)
                    return multiply_pairs(left, s.count,
                                          inputs_pairs<Code>(m, s.expert, begin, end, col, scratch.words), end - begin,
                                          sums);
            }
            for (int64_t k = begin; k < end; k += OUTPUTS<Code>) {
                const int64_t to = k + OUTPUTS<Code> < end ? k + OUTPUTS<Code> : end;
                inputs_stripes<Code>(m, s.expert, k, to, col, !paired(m), scratch.stripes);
                const Upcoming ahead = inputs_ahead<Code>(to < end ? Next{&m, s.expert, to, end, col} : next);
                const Left part{static_cast<const char*>(left.rows) + (k - begin) * (paired(m) ? 2 : 4), left.stride};
                for (int i = 0; i < span(m.format) / STRIPE; ++i)
                    multiply_stripe(m, part, s.count, scratch.stripes + i * OUTPUTS<Code> * STRIPE, to - k, scratch,
                                    sums + i * ROWS * STRIPE, i == 0 ? ahead : Upcoming{});
            }
        });
    }

    void order_inputs(const gs_matrix& m, const Segment& s, float* sums) const {
        with_code(m.format, [&](auto code) {
            constexpr int e = decltype(code)::per_word;
            if (e > 1 && !(e == 2 && paired(m))) put_in_order<e>(sums, s.count, ROWS * STRIPE);
        });
    }

    // thin[place][r] = sum_k rows[place][k] factor[k, r]: the first product of a LoRA
    template <class Gather>
    void thin(const Segment& s, int64_t depth, const Factor& factor, int64_t ranks, const Gather& gather_left,
              const Scratch& scratch, float* out) const {
        if (few(s) && factor.row == 1) return few_thin(s, depth, factor, ranks, gather_left, scratch, out);
        for (int64_t r = 0; r < ranks; r += STRIPE) {
            clear(scratch.sums, s.count);
            for (int64_t k = 0; k < depth; k += DEPTH) {
                const int64_t end = k + DEPTH < depth ? k + DEPTH : depth;
                gather_left(k, end, scratch.left);
                factor_stripe(factor, k, end, r, ranks, scratch.stripes);
                if (ranks - r <= 16)
                    multiply<16>(scratch.left, s.count, scratch.stripes, end - k, scratch.sums);
                else
                    multiply(scratch.left, s.count, scratch.stripes, end - k, scratch.sums);
            }
            const int64_t width = ranks - r < STRIPE ? ranks - r : STRIPE;
            for (int64_t i = 0; i < s.count; ++i)
                std::memcpy(out + (s.begin + i) * ranks + r, scratch.sums + i * STRIPE, static_cast<size_t>(width) * 4);
        }
    }

    // Two such products with the same rows and at most 16 columns each.
    template <class Gather>
    void thin_pair(const Segment& s, int64_t depth, const Factor (&factors)[2], const int64_t (&ranks)[2],
                   const Gather& gather_left, const Scratch& scratch, float* const (&outs)[2]) const {
        clear(scratch.sums, s.count);
        for (int64_t k = 0; k < depth; k += DEPTH) {
            const int64_t end = k + DEPTH < depth ? k + DEPTH : depth;
            gather_left(k, end, scratch.left);
            factor_stripe(factors[1], k, end, 0, ranks[1], scratch.stripes + 16, 16);
            factor_stripe(factors[0], k, end, 0, ranks[0], scratch.stripes, 16);
            multiply(scratch.left, s.count, scratch.stripes, end - k, scratch.sums);
        }
        for (int64_t i = 0; i < s.count; ++i)
            for (int which = 0; which < 2; ++which)
                std::memcpy(outs[which] + (s.begin + i) * ranks[which], scratch.sums + i * STRIPE + 16 * which,
                            static_cast<size_t>(ranks[which]) * 4);
    }

    // Whether A_gate x and A_up x can be one product: the same rows, and many of them.
    bool thin_together() const {
        const int64_t ranks_of[] = {ranks(args.gate), ranks(args.up)};
        return args.dropout == 0 && ranks_of[0] > 0 && ranks_of[1] > 0 && ranks_of[0] <= 16 && ranks_of[1] <= 16 &&
               !all_few(grouping);
    }
    void thin_x(const Segment& s, const Scratch& scratch, float* const (&outs)[2]) const {
        const Factor factors[] = {transposed(factor_of(args.gate.a, s.expert)),
                                  transposed(factor_of(args.up.a, s.expert))};
        const int64_t ranks_of[] = {ranks(args.gate), ranks(args.up)};
        const auto lay = [&](int64_t k, int64_t end, float* left) { gather_routes(x, s, k, end, nullptr, left); };
        if (!few(s)) return thin_pair(s, outer, factors, ranks_of, lay, scratch, outs);
        for (int i = 0; i < 2; ++i) thin(s, outer, factors[i], ranks_of[i], lay, scratch, outs[i]);
    }

    // The same for few rows and a factor with contiguous columns.
    template <class Gather>
    void few_thin(const Segment& s, int64_t depth, const Factor& factor, int64_t ranks, const Gather& gather_left,
                  const Scratch& scratch, float* out) const {
        std::memset(out + s.begin * ranks, 0, static_cast<size_t>(s.count * ranks) * 4);
        for (int64_t k = 0; k < depth; k += DEPTH) {
            const int64_t end = k + DEPTH < depth ? k + DEPTH : depth;
            gather_left(k, end, scratch.left);
            for (int64_t r = 0; r < ranks; ++r)
                for (int64_t i = 0; i < s.count; ++i)
                    out[(s.begin + i) * ranks + r] +=
                        dot_floats(factor.place(k, r), factor.bf16, scratch.left + i * LEFT_STRIDE, end - k);
        }
    }

    // sums[i][c] += scale * sum_r thin[place][r] factor[r, col + c]: the second product of a LoRA
    void wide(const Segment& s, const float* thin, int64_t ranks, double scale, const Factor& factor, int64_t col,
              int64_t columns, const Scratch& scratch, float* sums) const {
        for (int64_t r = 0; r < ranks; r += DEPTH) {
            const int64_t end = r + DEPTH < ranks ? r + DEPTH : ranks;
            for (int64_t i = 0; i < s.count; ++i) {  // elements written beyond the last one are not read
                const float* from = thin + (s.begin + i) * ranks;
                float* to = scratch.left + i * LEFT_STRIDE;
                for (int64_t k = r; k < end; k += LANES)
                    store(to + k - r, all(static_cast<float>(scale)) * load_some(from + k, end - k));
            }
            factor_stripe(factor, r, end, col, columns, scratch.stripes);
            multiply(scratch.left, s.count, scratch.stripes, end - r, sums);
        }
    }

    // The item that this worker will probably take after `item`, with `each` items per segment or chunk, `step` apart.
    NextItem after_segment(int64_t item, int64_t each, int64_t step) const {
        const int64_t next = item + threads() < grouping.segment_count * each ? item + threads() : item;
        return {grouping.segments[next / each].expert, next % each * step};
    }
    NextItem after_chunk(int64_t item, int64_t each, int64_t step) const {
        const int64_t next = item + threads() < grouping.chunk_count * each ? item + threads() : item;
        const Chunk& chunk = grouping.chunks[next / each];
        return {chunk.first < chunk.last ? grouping.parts[chunk.first].expert : 0, next % each * step};
    }

    // Block i of 32 columns of the sums.
    static float* block(const Scratch& scratch, int64_t i) { return scratch.sums + i * ROWS * STRIPE; }

    // Number of `items` that a worker takes together, up to `most`: after the first one, the rows on the left are in
    // L2. Each worker should still get `rounds` of them, so that others can take the last ones of a slow worker.
    static int64_t together(int64_t items, int64_t most, int64_t rounds = 2) {
        const int64_t share = items / (rounds * threads());
        return share < 1 ? 1 : share < most ? share : most;
    }

    static void clear(float* sums, int64_t rows) { std::memset(sums, 0, static_cast<size_t>(rows) * STRIPE * 4); }

private:
    static Left sheet(const char* rows, int64_t stride, const Segment& s, int64_t column) {
        return {rows + (s.begin * stride + column) * 2, stride / 2};
    }

    Left lay(const Rows& rows, const int64_t* list, int64_t first, int64_t count, int64_t begin, int64_t end,
             const gs_matrix& m, const Scratch& scratch) const {
        if (!paired(m)) {
            if (list)
                gather(rows, list, count, begin, end, scratch.left);
            else
                gather_run(rows, first, count, begin, end, scratch.left);
            return {scratch.left, LEFT_STRIDE};
        }
        const int64_t bytes = 2 * (end - begin), all = 2 * padded(end - begin);
        for (int64_t i = 0; i < count; ++i) {
            char* row = reinterpret_cast<char*>(scratch.left) + i * PAIR_STRIDE * 4;
            std::memcpy(row, rows.at(list ? list[i] : first + i, begin), static_cast<size_t>(bytes));
            std::memset(row + bytes, 0, static_cast<size_t>(all - bytes));
        }
        return {scratch.left, PAIR_STRIDE};
    }

    void multiply_stripe(const gs_matrix& m, const Left& left, int64_t rows, float* stripe, int64_t depth,
                         const Scratch& scratch, float* sums, const Upcoming& ahead) const {
        if (!paired(m)) return multiply(static_cast<const float*>(left.rows), rows, stripe, depth, sums, ahead);
        if constexpr (HAS_PAIRS)
            for (int cut = cuts(m); cut > 0; --cut)
                multiply_pairs(left, rows, peel(stripe, depth, scratch.words), depth, sums);
    }

    const Region<float> left_, stripes_, sums_, more_;
    const Region<uint32_t> words_;
    const Region<char> sheet_;
    const Region<float> lines_;  // for each worker: copies of rows that add_few cannot read in place

    int64_t longest() const { return (outer > inner ? outer : inner) + 16; }
    static bool any_few(const Grouping& p) {
        for (int64_t i = 0; i < p.segment_count; ++i)
            if (few(p.segments[i])) return true;
        for (int64_t c = 0; c < p.chunk_count; ++c)
            for (int64_t i = p.chunks[c].first; i < p.chunks[c].last; ++i)
                if (few(p.parts[i])) return true;
        return false;
    }

    // Whether every slice begins at a tile.
    static bool aligned(const gs_moe_args& a) {
        for (int64_t i = 0; i < a.slice_count; ++i)
            if (a.slices[i].begin % STEP) return false;
        return true;
    }
};

}  // namespace gs::GS_LEVEL
