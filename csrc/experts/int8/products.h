// Integer products: rows rounded to 8 bits per row and group, times the codes of a base in int8, int4 or int4_asym.
//
// Segments with few rows everywhere have their own kernels (few_rows/integers.h). Rows are rounded once, x per token
// and h per route, and stored part by part in the order of the decoded codes.
#pragma once

#include "../vectors/call.h"
#include "multiply.h"

namespace gs::GS_LEVEL {

class Int8Products {
public:
    explicit Int8Products(Call& call)
        : call_(call),
          on_(call.args.int8 > 0 && !Call::all_few(call.grouping)),
          gate_(on_ ? Groups::of(call.args.slices[0].gate) : Groups{}),
          x_(reserve(call.args.tokens, gate_.parts())),
          sheet_(reserve(call.grouping.routes, gate_.parts())),
          h_(reserve(call.grouping.routes, parts_of_down(call.args.slice_count))),
          words_(call.arena.each<uint32_t>(on_ ? PART / OCTETS * STRIPE : 0)),
          weights_(call.arena.each<float>(on_ ? PART / UNIT * STRIPE : 0)),
          partial_(call.arena.each<int32_t>(on_ ? 2 * ROWS * STRIPE : 0)) {}

    bool on() const { return on_; }

    void round_x() const {
        constexpr int64_t rows = 16;
        parallel_for((call_.args.tokens + rows - 1) / rows, [&](int64_t item, int) {
            for (int64_t t = item * rows; t < call_.args.tokens && t < (item + 1) * rows; ++t)
                round(call_.x, t * call_.slots, 0, call_.outer, gate_, x_, 0, t);
        });
        // copy to the order of the grouping, because every block of 32 features of g and u reads these rows
        parallel_for(call_.grouping.segment_count, [&](int64_t item, int) {
            const Segment& s = call_.grouping.segments[item];
            for (int64_t place = s.begin; place < s.begin + s.count; ++place)
                gate_.each_part([&](const Part& part, const Part&) {
                    const size_t bytes = offsetof(Lot, groups) + static_cast<size_t>(part.groups) * sizeof(Lot::Group);
                    std::memcpy(sheet_.at(part.index, place),
                                x_.at(part.index, call_.grouping.order[place] / call_.slots), bytes);
                });
        });
    }

    // Rounds the rows of h, which are in the order of the groups.
    void round_h(const Rows& h) const {
        parallel_for(call_.grouping.segment_count, [&](int64_t item, int) {
            const Segment& s = call_.grouping.segments[item];
            for (int64_t place = s.begin; place < s.begin + s.count; ++place)
                for (int64_t i = 0; i < call_.args.slice_count; ++i) {
                    const gs_slice& slice = call_.args.slices[i];
                    round(h, place, slice.begin, slice.end, Groups::of(slice.down), h_, parts_of_down(i), place);
                }
        });
    }

    // Computes 32 features of g and u for a segment, from `row` of a slice on.
    void gate_and_up(const Segment& s, const gs_slice& slice, int64_t row, int worker, float* g, float* u) const {
        gate_.each_part([&](const Part& part, const Part& next) {
            Product p = product(sheet_, part.index, part, s, worker);
            const int64_t next_row = next.begins() ? row + STRIPE : row;
            run(slice.gate, s, row, part, gate_, p, worker, g, {s.expert, next_row, next});
            p.partial += ROWS * STRIPE;
            run(slice.up, s, row, part, gate_, p, worker, u, {s.expert, next_row, next});
        });
    }

    // Adds slice `at` to 32 outputs from `row` on; the next call needs the weights of `next_expert` from `next_row` on.
    void down(const Segment& s, int64_t at, int64_t row, int64_t next_expert, int64_t next_row, int worker,
              float* sums) const {
        const gs_matrix& m = call_.args.slices[at].down;
        const Groups groups = Groups::of(m);
        const int64_t first = parts_of_down(at);
        groups.each_part([&](const Part& part, const Part& next) {
            Product p = product(h_, first + part.index, part, s, worker);
            const NextWeights next_codes{next.begins() ? next_expert : s.expert, next.begins() ? next_row : row, next};
            run(m, s, row, part, groups, p, worker, sums, next_codes);
        });
    }

private:
    // Rounded rows, stored part by part. Each slice of down has its own parts.
    struct Rounded {
        Region<Lot> lots;  // [parts][rows]
        int64_t rows;

        Lot* at(int64_t part, int64_t row) const { return lots.data() + part * rows + row; }
    };
    // The weights of the next product.
    struct NextWeights {
        int64_t expert, row;
        Part part;
    };

    Product product(const Rounded& rows, int64_t index, const Part& part, const Segment& s, int worker) const {
        Product p{};
        p.left = rows.at(index, s.begin), p.rows = s.count;
        p.words = words_.data(worker), p.weights = weights_.data(worker);
        p.groups = part.groups, p.length = part.length, p.first = part.first, p.last = part.last;
        p.partial = partial_.data(worker);
        return p;
    }

    void run(const gs_matrix& m, const Segment& s, int64_t row, const Part& part, const Groups& groups, Product& p,
             int worker, float* sums, const NextWeights& next_codes) const {
        with_octets(m.format, [&](auto code) {
            using Code = decltype(code);
            spread_part<Code>(m, s.expert, row, part, groups, words_.data(worker), weights_.data(worker));
            p.sums = sums;
            set_next_codes<Code>(m, next_codes, groups, p);
            multiply_octets(p);
        });
    }

    // Sets the addresses of the next part's codes, which products prefetch line by line. Prefetched while codes are
    // decoded, they exceed the outstanding lines that a core supports, and products stall for 1/5 of a call.
    template <class Code>
    static void set_next_codes(const gs_matrix& m, const NextWeights& next_codes, const Groups& groups, Product& p) {
        const Part& part = next_codes.part;
        const int64_t first = part.group * groups.inputs + part.from, left = groups.inputs - part.from,
                      last = part.groups > 1      ? first + part.groups * groups.inputs
                             : left < part.length ? first + left
                                                  : first + part.length;
        p.next_bytes = (last - first) / Code::per_word * 64;
        for (int half = 0; half < 2; ++half) {
            const int64_t row = next_codes.row + 16 * half;
            p.next_codes[half] =
                row < m.rows ? panel_of(m, next_codes.expert, row, false).data + first / Code::per_word * 64 : nullptr;
            if (p.next_codes[half]) fetch_scales(m, panel_of(m, next_codes.expert, row, false), first, last);
        }
    }

    // Decodes the codes of 32 outputs from `row` on, and their scales per group.
    template <class Code>
    static void spread_part(const gs_matrix& m, int64_t expert, int64_t row, const Part& part, const Groups& groups,
                            uint32_t* words, float* scales) {
        constexpr int64_t e = Code::per_word;
        const int64_t count = part.length / OCTETS, all = part.groups * count;
        for (int half = 0; half < 2; ++half) {
            uint32_t* out = words + 16 * half;
            const int64_t first = row + 16 * half;
            if (first >= m.rows) {
                for (int64_t i = 0; i < all; ++i) store_words(out + i * STRIPE, all_words(0));
                for (int64_t i = 0; i < part.groups; ++i) store(scales + i * STRIPE + 16 * half, zero());
                continue;
            }
            const Panel panel = panel_of(m, expert, first, false);
            for (int64_t i = 0; i < part.groups; ++i) {
                const int64_t group = part.group + i;
                store(scales + i * STRIPE + 16 * half, scales_of(m, panel, group));
                const Words offset = offset_of<Code>(m, panel, group);
                const int64_t begin = group * groups.inputs + part.from, left = groups.inputs - part.from;
                const int64_t inputs = left < part.length ? left : part.length;
                const char* from = panel.data + begin / e * 64;
                int64_t word = 0;
                for (int64_t k = 0; k < inputs; k += e, from += 64, word += e / OCTETS)
                    spread<Code>(load_words(from), offset, out + (i * count + word) * STRIPE);
                for (; word < count; ++word) store_words(out + (i * count + word) * STRIPE, all_words(0));
            }
        }
    }

    // Rounds columns [begin, end) of a row to the parts from `index` on of row `at`.
    void round(const Rows& rows, int64_t row, int64_t begin, int64_t end, const Groups& groups, const Rounded& to,
               int64_t index, int64_t at) const {
        const int64_t shared = call_.args.int8 < rows.columns ? call_.args.int8 : rows.columns;
        with_octets(call_.args.slices[0].down.format, [&](auto code) {
            round_row<decltype(code)>(rows, row, begin, end, shared, groups, to.at(index, at), to.rows);
        });
    }

    Rounded reserve(int64_t rows, int64_t parts) {
        const int64_t count = on_ ? rows : 0, more = count ? 32 : 0;  // tiles read past the last row
        return {call_.arena.shared<Lot>(count * parts + more), count};
    }

    // Number of parts of down's slices before this one.
    int64_t parts_of_down(int64_t slice) const {
        int64_t count = 0;
        for (int64_t i = 0; on_ && i < slice; ++i) count += Groups::of(call_.args.slices[i].down).parts();
        return count;
    }

    Call& call_;
    const bool on_;
    const Groups gate_;
    const Rounded x_, sheet_, h_;
    const Region<uint32_t> words_;
    const Region<float> weights_;
    const Region<int32_t> partial_;
};

}  // namespace gs::GS_LEVEL
