// Products of whole numbers: rows rounded to 8 bits, by row and group, with the codes of a base in int8 or int4.
//
//     scale = amax / 127 of a group, number = nearest(value / scale), ties to even; a group with NaN or Inf has scale
//     NaN, and so its row comes out NaN
//
// Rows are rounded once, x by token and h by route, and lie group by group in the order in which codes are spread.
#pragma once

#include "call.h"
#include "int8_multiply.h"

namespace gs::GS_LEVEL {

// How the inputs of a matrix lie in groups.
struct Groups {
    int64_t inputs, count, length;  // length: of a group in numbers, filled up

    static Groups of(const gs_matrix& m) {
        const int64_t length = (m.group + UNIT - 1) / UNIT * UNIT;
        return {m.group, (m.cols + m.group - 1) / m.group, length};
    }
    int64_t numbers() const { return count * length; }
};

// Rows as whole numbers. Of down's inputs every slice has a piece of its own.
struct Rounded {
    Region<Octet> numbers;  // [rows][stride]
    Region<float> scales;   // [rows][groups]
    Region<int32_t> starts;
    int64_t stride, groups;
};

class Int8Products {
public:
    explicit Int8Products(Call& call)
        : call_(call),
          on_(call.args.int8 > 0),
          gate_(on_ ? Groups::of(call.args.slices[0].gate) : Groups{}),
          x_(reserve(call.args.tokens, gate_.numbers(), gate_.count)),
          sheet_(reserve(call.plan.routes, gate_.numbers(), gate_.count)),
          h_(reserve(call.plan.routes, numbers_of_down(call.args.slice_count), groups_of_down(call.args.slice_count))),
          words_(call.arena.each<uint32_t>(on_ ? PART / OCTETS * STRIPE : 0)),
          weights_(call.arena.each<float>(on_ ? STRIPE * STRIPE : 0)),
          partial_(call.arena.each<int32_t>(on_ ? 2 * ROWS * STRIPE : 0)) {}

    bool on() const { return on_; }

    void round_x() const {
        constexpr int64_t rows = 16;
        parallel_for((call_.args.tokens + rows - 1) / rows, [&](int64_t item, int) {
            for (int64_t t = item * rows; t < call_.args.tokens && t < (item + 1) * rows; ++t)
                round_row(x_, t, call_.x, t * call_.slots, call_.outer, 0, call_.outer, gate_, 0, 0);
        });
        // read by every 32 features of g and u: in the order of the plan
        parallel_for(call_.plan.segment_count, [&](int64_t item, int) {
            const Segment& s = call_.plan.segments[item];
            for (int64_t place = s.begin; place < s.begin + s.count; ++place) {
                const int64_t token = call_.plan.order[place] / call_.slots;
                copy(x_.numbers, token * x_.stride, sheet_.numbers, place * x_.stride, x_.stride);
                copy(x_.scales, token * x_.groups, sheet_.scales, place * x_.groups, x_.groups);
                copy(x_.starts, token * x_.groups, sheet_.starts, place * x_.groups, x_.groups);
            }
        });
    }

    // The rows of h, which lie in the order of the plan.
    void round_h(const Rows& h) const {
        parallel_for(call_.plan.segment_count, [&](int64_t item, int) {
            const Segment& s = call_.plan.segments[item];
            for (int64_t place = s.begin; place < s.begin + s.count; ++place)
                for (int64_t i = 0; i < call_.args.slice_count; ++i) {
                    const gs_slice& slice = call_.args.slices[i];
                    round_row(h_, place, h, place, call_.inner, slice.begin, slice.end, Groups::of(slice.down),
                              numbers_of_down(i), groups_of_down(i));
                }
        });
    }

    // 32 features of g and u for a segment, from `row` of a slice on
    void gate_and_up(const Segment& s, const gs_slice& slice, int64_t row, int worker, float* g, float* u) const {
        each_part(gate_, [&](const Part& part, const Part& next) {
            Product p = product(part, s.count, worker);
            take(sheet_, s, part.group * gate_.length + part.from, part.group, p);
            const int64_t next_row = next.begins() ? row + STRIPE : row;
            run(slice.gate, s, row, part, gate_, p, worker, g, {s.expert, next_row, next});
            p.partial += ROWS * STRIPE;
            run(slice.up, s, row, part, gate_, p, worker, u, {s.expert, next_row, next});
        });
    }

    // 32 outputs from `row` on: what a slice adds to them. Then those of `next_expert` from `next_row` on are wanted.
    void down(const Segment& s, int64_t at, int64_t row, int64_t next_expert, int64_t next_row, int worker,
              float* sums) const {
        const gs_matrix& m = call_.args.slices[at].down;
        const Groups groups = Groups::of(m);
        each_part(groups, [&](const Part& part, const Part& next) {
            Product p = product(part, s.count, worker);
            take(h_, s, numbers_of_down(at) + part.group * groups.length + part.from, groups_of_down(at) + part.group,
                 p);
            const Soon soon{next.begins() ? next_expert : s.expert, next.begins() ? next_row : row, next};
            run(m, s, row, part, groups, p, worker, sums, soon);
        });
    }

private:
    // Some whole groups, or a part of one.
    struct Part {
        int64_t group, groups, from, length;
        bool first, last;

        bool begins() const { return group == 0 && from == 0; }
    };
    // Which weights are multiplied after these.
    struct Soon {
        int64_t expert, row;
        Part part;
    };

    // action(part, the next one): after the last part comes the first.
    template <class Action> static void each_part(const Groups& g, const Action& action) {
        const Part begin = part_at(g, 0, 0);
        for (Part part = begin, next; part.group < g.count; part = next) {
            next = part.last ? part_at(g, part.group + part.groups, 0) : part_at(g, part.group, part.from + PART);
            action(part, next.group < g.count ? next : begin);
        }
    }
    static Part part_at(const Groups& g, int64_t group, int64_t from) {
        if (g.length <= PART) {
            const int64_t left = g.count - group, each = PART / g.length;
            return {group, left < each ? left : each, 0, g.length, true, true};
        }
        const int64_t left = g.length - from, length = left < PART ? left : PART;
        return {group, 1, from, length, from == 0, length == left};
    }

    template <class T>
    static void copy(const Region<T>& from, int64_t first, const Region<T>& to, int64_t at, int64_t count) {
        std::memcpy(to.data() + at, from.data() + first, static_cast<size_t>(count) * sizeof(T));
    }

    // Rows that lie in the order of the plan, from a number and a group on.
    static void take(const Rounded& rows, const Segment& s, int64_t number, int64_t group, Product& p) {
        const int64_t first = s.begin * rows.groups + group;
        p.left = rows.numbers.data() + s.begin * rows.stride + number, p.stride = rows.stride;
        p.scales = rows.scales.data() + first, p.starts = rows.starts.data() + first, p.scale_stride = rows.groups;
    }

    Product product(const Part& part, int64_t rows, int worker) const {
        Product p{};
        p.rows = rows, p.words = words_.data(worker), p.weights = weights_.data(worker);
        p.groups = part.groups, p.length = part.length, p.first = part.first, p.last = part.last;
        p.partial = partial_.data(worker);
        return p;
    }

    void run(const gs_matrix& m, const Segment& s, int64_t row, const Part& part, const Groups& groups, Product& p,
             int worker, float* sums, const Soon& soon) const {
        with_octets(m.format, [&](auto code) {
            using Code = decltype(code);
            spread_part<Code>(m, s.expert, row, part, groups, words_.data(worker), weights_.data(worker));
            p.sums = sums;
            fetch_soon<Code>(m, soon, groups, p);
            multiply_octets(p);
        });
    }

    // Where the codes of the next part lie: products fetch them, a line at a time. Fetched while codes are spread, more
    // lines are under way than a core can wait for, and products stand still for a fifth of a call.
    template <class Code>
    static void fetch_soon(const gs_matrix& m, const Soon& soon, const Groups& groups, Product& p) {
        const Part& part = soon.part;
        const int64_t first = part.group * groups.inputs + part.from, left = groups.inputs - part.from,
                      last = part.groups > 1      ? first + part.groups * groups.inputs
                             : left < part.length ? first + left
                                                  : first + part.length;
        p.soon_bytes = (last - first) / Code::per_word * 64;
        for (int half = 0; half < 2; ++half) {
            const int64_t row = soon.row + 16 * half;
            p.soon[half] =
                row < m.rows ? panel_of(m, soon.expert, row, false).data + first / Code::per_word * 64 : nullptr;
        }
    }

    template <class Action> static void with_octets(gs_format format, const Action& action) {
        switch (format) {
            case GS_INT8: return action(Int8{});
            case GS_INT4: return action(Int4{});
            default: return action(Int4Asym{});
        }
    }

    // The codes of 32 outputs from `row` on, and their scales by group.
    template <class Code>
    static void spread_part(const gs_matrix& m, int64_t expert, int64_t row, const Part& part, const Groups& groups,
                            uint32_t* words, float* scales) {
        constexpr int64_t e = Code::per_word;
        const int64_t count = part.length / OCTETS, all = part.groups * count;
        for (int half = 0; half < 2; ++half) {
            uint32_t* out = words + 16 * half;
            const int64_t first = row + 16 * half;
            if (first >= m.rows) {
                for (int64_t i = 0; i < all; ++i) keep_words(out + i * STRIPE, all_words(0));
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
                for (; word < count; ++word) keep_words(out + (i * count + word) * STRIPE, all_words(0));
            }
        }
    }

    // Columns [begin, end) of a row of `width`, whose groups of scale may be wider than those of the matrix.
    void round_row(const Rounded& to, int64_t at, const Rows& rows, int64_t row, int64_t width, int64_t begin,
                   int64_t end, const Groups& groups, int64_t first_number, int64_t first_group) const {
        const int64_t shared = call_.args.int8 < width ? call_.args.int8 : width;
        int64_t known = -1;
        float scale = 0;
        for (int64_t i = 0; i < groups.count; ++i) {
            const int64_t from = begin + i * groups.inputs, to_column = from + groups.inputs;
            if (from / shared != known) {
                known = from / shared;
                const int64_t last = (known + 1) * shared;
                scale = scale_of(rows, row, known * shared, last < width ? last : width);
            }
            Octet* numbers = to.numbers.data() + at * to.stride + first_number + i * groups.length;
            const int64_t place = at * to.groups + first_group + i;
            to.scales.data()[place] = scale;
            to.starts.data()[place] =
                round_group(rows, row, from, to_column < end ? to_column : end, scale, groups.length, numbers);
        }
    }

    static float scale_of(const Rows& rows, int64_t row, int64_t begin, int64_t end) {
        alignas(64) float values[PART];
        Floats most = zero(), lost = zero();
        for (int64_t k = begin; k < end; k += PART) {
            const int64_t count = end - k < PART ? end - k : PART, all = (count + LANES - 1) / LANES * LANES;
            read(rows.at(row, k), rows.bf16, count, values);
            for (int64_t j = count; j < all; ++j) values[j] = 0;
            for (int64_t j = 0; j < all; j += LANES) {
                const Floats v = load(values + j);
                most = greater(most, greater(v, zero() - v)), lost = lost + (v - v);
            }
        }
        alignas(64) float lanes[2][LANES];
        store(lanes[0], most), store(lanes[1], lost);
        float largest = 0;
        bool finite = true;
        for (int i = 0; i < LANES; ++i) {
            finite = finite && lanes[1][i] == 0;
            if (lanes[0][i] > largest) largest = lanes[0][i];
        }
        return finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
    }

    // The numbers of a group, and where its sums begin: what lifted weights give too much is taken off before.
    int32_t round_group(const Rows& rows, int64_t row, int64_t begin, int64_t end, float scale, int64_t length,
                        Octet* to) const {
        alignas(64) float values[PART];
        alignas(64) int8_t codes[PART];
        const Floats divisor = all(scale == 0 ? 1 : scale);
        const gs_format format = call_.args.slices[0].down.format;
        int32_t total = 0;
        for (int64_t done = 0; done < length; done += PART) {
            const int64_t room = length - done < PART ? length - done : PART, left = end - begin - done;
            const int64_t count = scale != scale || left < 0 ? 0 : left < room ? left : room;
            read(rows.at(row, begin + done), rows.bf16, count, values);
            const int64_t whole = (count + LANES - 1) / LANES * LANES;
            for (int64_t j = count; j < whole; ++j) values[j] = 0;
            for (int64_t j = 0; j < whole; j += LANES)
                keep_codes(codes + j, lesser(all(127), greater(all(-127), round(load(values + j) / divisor))));
            for (int64_t j = whole; j < room; ++j) codes[j] = 0;
            for (int64_t j = 0; j < room; ++j) total += codes[j];
            with_octets(format, [&](auto code) { lay_out<decltype(code)>(codes, room, to + done); });
        }
        int32_t bias = 0;
        with_octets(format, [&](auto code) { bias = BIAS<decltype(code)>; });
        return -bias * total;
    }

    template <class Code> static void lay_out(const int8_t* codes, int64_t count, Octet* to) {
        for (int64_t j = 0; j < count; j += 8)
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) to[j + i] = codes[j + order_of<Code>(i)];
    }

    Rounded reserve(int64_t rows, int64_t numbers, int64_t groups) {
        const int64_t count = on_ ? rows : 0, more = count ? 32 : 0;  // tiles read beyond the last one
        const int64_t stride = numbers + 64 / sizeof(Octet);          // rows do not fall on each other's cache sets
        return {call_.arena.shared<Octet>((count + more) * stride), call_.arena.shared<float>(count * groups),
                call_.arena.shared<int32_t>(count * groups), stride, groups};
    }

    // Of down's slices before this one.
    int64_t numbers_of_down(int64_t slice) const {
        int64_t count = 0;
        for (int64_t i = 0; on_ && i < slice; ++i) count += Groups::of(call_.args.slices[i].down).numbers();
        return count;
    }
    int64_t groups_of_down(int64_t slice) const {
        int64_t count = 0;
        for (int64_t i = 0; on_ && i < slice; ++i) count += Groups::of(call_.args.slices[i].down).count;
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
