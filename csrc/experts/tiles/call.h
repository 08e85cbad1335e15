// The state and shared steps of a call whose products all use tiles: bfloat16 rows, LoRA without dropout, a frozen
// base. An item belongs to a part of the grouping (the routes of an expert in a chunk of tokens), whose rows stay in L2
// while the weights are streamed.
#pragma once

#include "../../arena.h"
#include "../../pool.h"
#include "../vectors/call.h"
#include "left_codes.h"
#include "parts.h"
#include "right_codes.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

constexpr int64_t LEAST = 4;  // minimum average rows per expert
constexpr int64_t MOST_CUTS = 3;
constexpr int64_t RESULT_BYTES = int64_t{64} << 20;  // approximate memory for rows that wait to be summed

// Columns [first, first + width) of a slice, width <= 32; begin: index in the whole.
struct Strip {
    int64_t slice, first, width, begin, block;
};

struct TileCall {
    const gs_moe_args& args;
    const Grouping& grouping;
    const int64_t outer, inner, slots, parts;
    const int64_t outer_blocks, inner_blocks;
    const Rows x;
    Arena arena;
    const Region<int64_t> groups;  // first group of 16 rows of each part
    const Region<Progress> progress;

    // Whether the call uses tiles. With fewer rows per expert, codes are multiplied as they arrive from memory. So are
    // the rows of a step, whose sums must not depend on the other tokens.
    static bool takes(const gs_moe_args& a, const Grouping& p) {
        return a.tokens > MOST_FEW && p.routes > LEAST * p.segment_count && a.x.dtype == GS_BF16 && !a.int8 &&
               a.dropout == 0 && !given(a.dgate_up) && !given(a.ddown) && !given(a.dgate_up_bias) &&
               !given(a.ddown_bias);
    }

    TileCall(const gs_moe_args& a, const Grouping& p)
        : args(a),
          grouping(p),
          outer(a.hidden),
          inner(a.intermediate),
          slots(a.slots),
          parts(p.chunk_count ? p.chunks[p.chunk_count - 1].last : 0),
          outer_blocks((outer + 31) / 32),
          inner_blocks(blocks_of(a)),
          x(rows_of(a.x, a.hidden, a.slots)),
          groups(arena.shared<int64_t>(parts + 1)),
          progress(arena.shared<Progress>(parts)),
          sums_(arena.each<float>(2 * 32 * 32)),
          thin_weights_(arena.each<char>(thin_bytes())) {}

    void number_groups() const {
        int64_t* begin = groups.data();
        begin[0] = 0;
        for (int64_t i = 0; i < parts; ++i) begin[i + 1] = begin[i] + (grouping.parts[i].count + 15) / 16;
    }
    int64_t all_groups() const {
        int64_t count = 0;
        for (int64_t i = 0; i < parts; ++i) count += (grouping.parts[i].count + 15) / 16;
        return count;
    }

    int64_t ranks(const gs_lora& lora) const { return given(lora.a) ? lora.a.sizes[1] : 0; }
    Region<char> sheet(int64_t blocks) { return arena.shared<char>(all_groups() * blocks * TILE_BYTES); }

    // Block number `block` of 32 intermediate features; blocks do not cross slices.
    Strip strip(int64_t block) const {
        int64_t at = block;
        for (int64_t s = 0;; ++s) {
            const int64_t size = args.slices[s].end - args.slices[s].begin, here = (size + 31) / 32;
            if (at < here)
                return {s, 32 * at, size - 32 * at < 32 ? size - 32 * at : 32, args.slices[s].begin + 32 * at, block};
            at -= here;
        }
    }
    int64_t blocks_of_slice(int64_t s) const { return (args.slices[s].end - args.slices[s].begin + 31) / 32; }

    // The pieces of every part: enough for several per worker, with at least `least` blocks each.
    struct Split {
        int64_t pieces, blocks;
        int64_t begin(int64_t piece) const { return blocks * piece / pieces; }
    };
    Split split(int64_t count, int64_t blocks, int64_t least) const {
        const int64_t wanted = count ? (12 * threads() + count - 1) / count : 1, most = blocks / least;
        const int64_t pieces = wanted < most ? wanted : most;
        return {pieces < 1 ? 1 : pieces, blocks};
    }

    // Calls action(group, first place, rows) for each 16 rows of a part.
    template <class Action> void each_group(int64_t part, int64_t from, int64_t to, const Action& action) const {
        const Segment& s = grouping.parts[part];
        for (int64_t g = from; g < to; ++g) {
            const int64_t place = s.begin + 16 * g, left = s.begin + s.count - place;
            action(groups.data()[part] + g, place, left < 16 ? left : 16);
        }
    }
    int64_t groups_of(int64_t part) const { return groups.data()[part + 1] - groups.data()[part]; }

    void fill(const Rows& rows, const Sheet& to, bool turned, int64_t part, int64_t from, int64_t until) const {
        each_group(part, from, until, [&](int64_t group, int64_t place, int64_t count) {
            const char* lines[16] = {};
            for (int64_t i = 0; i < count; ++i) lines[i] = rows.at(grouping.order[place + i], 0);
            if (turned)
                fill_turned(lines, rows.columns, to, group);
            else
                fill_tiles(lines, rows.columns, to, group);
        });
    }

    // The first product of a LoRA for groups [from, until) of a part: thin[place][r] = sum_k rows[place][k] factor[k,
    // r]. Rows of each slice are padded to whole tiles, so sliced depths are traversed slice by slice.
    void thin(int64_t part, int64_t from, int64_t until, const Sheet& rows, bool turned, const Factor& factor,
              int64_t depth, bool sliced, int64_t ranks, int worker, float* out) const {
        const int cuts = factor.bf16 ? 1 : 3;
        const Segment& s = grouping.parts[part];
        char* const weights = thin_weights_.data(worker);
        float* const sums = sums_.data(worker);
        for (int64_t first = 0; first < ranks; first += 16) {
            thin_factor(factor, depth, sliced, first, ranks, cuts, turned, weights);
            const int64_t width = ranks - first < 16 ? ranks - first : 16;
            for (int64_t g = from; g < until; g += 2) {
                const int64_t group = groups.data()[part] + g;
                const bool two = g + 1 < until;
                const char *low = rows.tile(group, 0), *high = rows.tile(group + (two ? 1 : 0), 0);
                const int64_t step = cuts * 2 * TILE_BYTES;
                const Link of_rows{low, high, weights, weights, TILE_BYTES, step, rows.blocks},
                    of_turned{weights, weights, low, high, step, TILE_BYTES, rows.blocks};
                if (turned)
                    dot<ON_THE_LEFT>(&of_turned, 1, cuts, false, two, {}, sums);
                else
                    dot<ON_THE_RIGHT>(&of_rows, 1, cuts, two, false, {}, sums);
                const int64_t place = s.begin + 16 * g, left = s.begin + s.count - place, all = two ? 32 : 16;
                for (int64_t i = 0; i < (left < all ? left : all); ++i)
                    for (int64_t r = 0; r < width; ++r)
                        out[(place + i) * ranks + first + r] = turned ? sums[32 * r + i] : sums[32 * i + r];
            }
        }
    }

    // The second product of a LoRA: sums[i][c] += sum_r thin[i][r] lines[r][c], 32 rows of 32 columns, with
    // lines = scale * factor[r, col + c].
    static void wide(const float* thin, int64_t ranks, const float* lines, int64_t rows, float* sums) {
        for (int64_t i = 0; i < rows; i += 4) {
            const int64_t count = rows - i < 4 ? rows - i : 4;
            __m512 sum[4][2];
            for (int64_t t = 0; t < 4; ++t)
                for (int c = 0; c < 2; ++c) sum[t][c] = _mm512_setzero_ps();
            const float* row[4];
            for (int64_t t = 0; t < 4; ++t) row[t] = thin + (i + (t < count ? t : 0)) * ranks;
            for (int64_t r = 0; r < ranks; ++r) {
                const __m512 a = _mm512_loadu_ps(lines + 32 * r), b = _mm512_loadu_ps(lines + 32 * r + 16);
                for (int t = 0; t < 4; ++t) {
                    const __m512 v = _mm512_set1_ps(row[t][r]);
                    sum[t][0] = _mm512_fmadd_ps(v, a, sum[t][0]), sum[t][1] = _mm512_fmadd_ps(v, b, sum[t][1]);
                }
            }
            for (int64_t t = 0; t < count; ++t)
                for (int c = 0; c < 2; ++c) {
                    float* at = sums + 32 * (i + t) + 16 * c;
                    _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum[t][c]));
                }
        }
    }
    // The lines of `wide` for 32 columns from `col` on.
    static void wide_lines(const Factor& factor, int64_t ranks, double scale, int64_t col, int64_t columns,
                           float* lines) {
        factor_stripe(factor, 0, ranks, col, columns, lines);
        for (int64_t i = 0; i < 32 * ranks; i += 16) store(lines + i, all(static_cast<float>(scale)) * load(lines + i));
    }

    // Makes tiles for the right side (outputs [row, row + 32)) while the previous ones are multiplied.
    struct RightDecoder {
        const gs_matrix* m;
        int64_t expert, row, next, end, slots;
        char* tiles;

        static void step(void* self) {
            auto& d = *static_cast<RightDecoder*>(self);
            if (d.next == d.end) return;
            const int count = cuts(*d.m);
            with_code(d.m->format, [&](auto code) {
                right_tiles<decltype(code)>(*d.m, d.expert, d.row, d.next, count,
                                            d.tiles + d.next % d.slots * count * 2 * TILE_BYTES);
            });
            ++d.next;
        }
    };

    // Prepares products with weights on the right. Packed bfloat16 is read in place. Other formats become `tiles`:
    // unscaled codes with `scales` at once, scaled weights by `rest` during the first right_dot; if that is the only
    // one, in a few buffers in L1.
    void right_link(const gs_matrix& m, int64_t expert, int64_t row, int64_t blocks, bool once, char* tiles,
                    float* scales, RightDecoder& rest, Link& link) const {
        rest = {&m, expert, row, 0, 0, once ? ROUND : blocks, tiles};
        link.steps = blocks;
        if (m.format == GS_PACKED_BF16) {
            link.first = panel_of(m, expert, row, false).data;
            link.second = row + 16 < m.rows ? link.first + m.panel_bytes : link.first;
            link.right_step = TILE_BYTES;
            return;
        }
        rest.end = takes_codes(m) ? 0 : blocks;
        with_code(m.format, [&](auto code) {
            using Code = decltype(code);
            if constexpr (Code::scaled)
                if (takes_codes(m)) code_tiles<Code>(m, expert, row, blocks, tiles, scales);
        });
        link.first = tiles, link.second = tiles + TILE_BYTES, link.right_step = cuts_on_the_right(m) * 2 * TILE_BYTES;
    }
    static void right_dot(const gs_matrix& m, const Link& link, const float* scales, RightDecoder& rest, bool tall,
                          Ahead ahead, float* sums) {
        if (takes_codes(m)) return dot_codes(m, link, scales, tall, ahead, sums);
        if (rest.next < rest.end) {
            RightDecoder::step(&rest), RightDecoder::step(&rest);  // two steps before their products
            ahead.decode = RightDecoder::step, ahead.self = &rest;
        }
        if (rest.slots == ROUND && rest.end > 0)
            dot<ON_THE_RIGHT, true>(&link, 1, cuts(m), tall, true, ahead, sums);
        else
            dot<ON_THE_RIGHT>(&link, 1, cuts(m), tall, true, ahead, sums);
    }
    static int64_t scales_on_the_right(const gs_matrix& m) {
        return takes_codes(m) && m.group > 0 ? 32 * ((m.cols + m.group - 1) / m.group) : 0;
    }
    // Prepares products with weights on the left: the inputs of a block, all outputs of the matrix, transposed rows.
    static void left_link(const gs_matrix& m, char* tiles, Link& link) {
        link.steps = (m.rows + 31) / 32;
        link.upper = tiles, link.lower = tiles + TILE_BYTES, link.left_step = cuts_on_the_left(m) * 2 * TILE_BYTES;
        link.right_step = TILE_BYTES;
    }
    // With one pair of groups each weight tile is used once and made just before that. Not with three cuts, which take
    // half of L1 and make a layer of H 1024 and I 512 7 % slower, nor for mxfp4, which becomes 5 to 10 % slower for an
    // unknown reason.
    static bool used_once(const gs_matrix& m, int64_t pairs) {
        return pairs == 1 && left_way(m) == CUT && cuts(m) < MOST_CUTS && m.format != GS_MXFP4;
    }
    static void left_dot(bool once, const Link* links, int64_t count, int cuts, bool wide, const Ahead& ahead,
                         float* sums) {
        if (once)
            dot<ON_THE_LEFT, true>(links, count, cuts, true, wide, ahead, sums);
        else
            dot<ON_THE_LEFT>(links, count, cuts, true, wide, ahead, sums);
    }
    // Makes tiles for the left side, of several matrices in turn: those of the next block while the pairs of this one
    // are multiplied, a tile every `pairs` steps; or, if `once`, those of this block, in ROUND buffers.
    struct LeftDecoder {
        const TileCall& call;
        bool down;
        int64_t expert, pairs, block;
        bool once;
        char* tiles;
        int64_t matrix = 0, next = 0, waited = 0;

        static void step(void* self) {
            auto& d = *static_cast<LeftDecoder*>(self);
            if (++d.waited < d.pairs) return;
            d.waited = 0;
            d.one();
        }
        void finish() {
            while (one()) {}
        }

    private:
        bool one() {
            for (;; ++matrix, next = 0) {
                if (matrix == (down ? 1 : 2 * call.args.slice_count)) return false;
                const Strip c = down ? call.strip(block) : Strip{matrix / 2, 32 * block, 0, 0, 0};
                const gs_slice& slice = call.args.slices[c.slice];
                const gs_matrix& m = down ? slice.down : matrix % 2 ? slice.up : slice.gate;
                const int64_t steps = (m.rows + 31) / 32;
                if (next < steps) {
                    constexpr int64_t ahead =
                        3;  // 2 % faster than 1, the same as 6 to 12; panels share a few sets of L2
                    const int64_t block_there = c.first / 32;
                    const int count = cuts_on_the_left(m);
                    char* const to = tiles + (once ? next % ROUND : next) * count * 2 * TILE_BYTES;
                    with_code(m.format, [&](auto code) {
                        using Code = decltype(code);
                        if constexpr (Code::per_word == 4)
                            if (left_way(m) != CUT)
                                return left_tiles<Code, true>(m, expert, block_there, next, next + 1, ahead, count, to);
                        left_tiles<Code>(m, expert, block_there, next, next + 1, ahead, count, to);
                    });
                    ++next;
                    return true;
                }
                tiles += strip_bytes(m, once ? ROUND : steps);
            }
        }
    };
    static int64_t strip_bytes(const gs_matrix& m, int64_t steps) {
        return cuts_on_the_left(m) * 2 * TILE_BYTES * steps;
    }

    float* sums(int worker) const { return sums_.data(worker); }

    // Calls begin(part, first group, last group, worker) for each part in [first, last), then piece(part, first block,
    // last block, worker) for all of its blocks. With fewer parts than workers, beginning is split, too.
    template <class Begin, class Piece>
    void in_turn(int64_t first, int64_t last, const Split& strips, const Begin& begin, const Piece& piece) const {
        const auto some = [&](int64_t part, int64_t k, int worker) {
            piece(part, strips.begin(k), strips.begin(k + 1), worker);
        };
        if (last - first >= threads())
            return each_part(
                first, last, strips.pieces, progress.data(),
                [&](int64_t part, int worker) { begin(part, 0, groups_of(part), worker); }, some);
        in_halves(first, last, begin);
        parallel_for((last - first) * strips.pieces, [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            some(first + item / strips.pieces, item % strips.pieces, worker);
        });
    }

    // Calls action(part, first group, last group, worker) for every part, split into pieces.
    template <class Action> void in_halves(int64_t first, int64_t last, const Action& action) const {
        const Split halves = split(last - first, 16, 4);
        parallel_for((last - first) * halves.pieces, [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t part = first + item / halves.pieces, piece = item % halves.pieces, all = groups_of(part),
                          from = all * piece / halves.pieces, to = all * (piece + 1) / halves.pieces;
            if (from < to) action(part, from, to, worker);
        });
    }

    // Sums the rows of a token's routes over columns [col, col + width), optionally times the routes' weights.
    void add_up(const Chunk& chunk, int64_t t, int64_t col, int64_t width, bool weighed, const float* rows,
                int64_t columns, const gs_tensor& out) const {
        constexpr int64_t most = 512;
        alignas(64) float total[most];
        for (int64_t from = 0; from < width; from += most) {
            const int64_t count = width - from < most ? width - from : most;
            std::memset(total, 0, sizeof total);
            for (int64_t route = t * slots; route < (t + 1) * slots; ++route) {
                if (id_at(args, route) < 0) continue;
                const float* row = rows + (route - chunk.begin * slots) * columns + from;
                const Floats w = all(weighed ? weight_at(args, route) : 1);
                for (int64_t j = 0; j < count; j += LANES) store(total + j, fma(w, load(row + j), load(total + j)));
            }
            write(static_cast<char*>(out.data) + (t * outer + col + from) * 2, true, count, total);
        }
    }

    // Number of result columns that are computed before summing: all, if memory allows.
    int64_t columns_at_once() const {
        const int64_t bytes = 4 * outer * grouping.chunk_routes, wanted = (bytes + RESULT_BYTES - 1) / RESULT_BYTES,
                      most = (outer_blocks + 7) / 8,
                      times = wanted < 1      ? 1
                              : wanted < most ? wanted
                                              : most;
        return (outer_blocks + times - 1) / times * 32;
    }

private:
    static int64_t blocks_of(const gs_moe_args& a) {
        int64_t count = 0;
        for (int64_t s = 0; s < a.slice_count; ++s) count += (a.slices[s].end - a.slices[s].begin + 31) / 32;
        return count;
    }
    int64_t thin_bytes() const {
        const int64_t blocks = outer_blocks > inner_blocks ? outer_blocks : inner_blocks;
        return MOST_CUTS * 2 * TILE_BYTES * blocks;
    }

    void thin_factor(const Factor& factor, int64_t depth, bool sliced, int64_t first, int64_t ranks, int cuts,
                     bool turned, char* out) const {
        const auto lay = [&](const Factor& part, int64_t size) {
            if (turned)
                factor_left(part, size, first, ranks, cuts, out);
            else
                factor_right(part, size, first, ranks, cuts, out);
            out += (size + 31) / 32 * cuts * 2 * TILE_BYTES;
        };
        if (!sliced) return lay(factor, depth);
        for (int64_t i = 0; i < args.slice_count; ++i) {
            Factor part = factor;
            part.data = factor.place(args.slices[i].begin, 0);
            lay(part, args.slices[i].end - args.slices[i].begin);
        }
    }

    const Region<float> sums_;
    const Region<char> thin_weights_;
};

}  // namespace gs::GS_LEVEL

#endif
