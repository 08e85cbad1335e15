// y = x W^T + bias for one packed matrix, with the products of experts.moe: few rows read codes as they arrive from
// memory, more rows are multiplied with decoded stripes.
#pragma once

#include "call.h"

namespace gs::GS_LEVEL {

struct Linear : Call {
    const gs_matrix& weight;
    const gs_tensor &bias, &y;
    const int64_t panels, panels_at_once;  // panels of 32 outputs; those that one item computes

    Linear(const gs_linear_args& a, const gs_moe_args& rows, const Grouping& p)
        : Call(rows, p),
          weight(a.weight),
          bias(a.bias),
          y(rows.y),
          panels((a.weight.rows + STRIPE - 1) / STRIPE),
          panels_at_once(together(p.segment_count * panels, BLOCKS, all_few(p) ? 16 : 2)) {
        arena.allocate();
    }

    void run() {
        fill_sheet(x, false);
        const int64_t items = (panels + panels_at_once - 1) / panels_at_once;
        parallel_for(grouping.segment_count * items, [&](int64_t item, int worker) {
            [[maybe_unused]] const Tiles tiles;
            const int64_t first = item % items * panels_at_once, left = panels - first;
            outputs(grouping.segments[item / items], first, left < panels_at_once ? left : panels_at_once,
                    after_segment(item, items, panels_at_once).first, scratch(worker), worker);
        });
        arena.check();
    }

private:
    // later: the first panel of this worker's next item
    void outputs(const Segment& s, int64_t first, int64_t count, int64_t later, const Scratch& scratch,
                 int worker) const {
        for (int64_t i = 0; i < count; ++i) clear(block(scratch, i), s.count);
        if (few(s))
            add_few_outputs(s, first, count, later, scratch, worker);
        else
            add_many_outputs(s, first, count, later, scratch);
        for (int64_t i = 0; i < s.count; ++i)
            for (int64_t k = 0; k < count; ++k)
                write_row(grouping.order[s.begin + i], (first + k) * STRIPE, block(scratch, k) + i * STRIPE);
    }

    void add_few_outputs(const Segment& s, int64_t first, int64_t count, int64_t later, const Scratch& scratch,
                         int worker) const {
        fetch_few(weight, s.expert, first * STRIPE);
        const Lines lines = lay_few(x, grouping.order + s.begin, s, 0, weight, worker);
        for (int64_t i = 0; i < count; ++i)
            add_few(weight, s.expert, (first + i) * STRIPE, lines, s.count,
                    few_panel(weight, s.expert, (i + 1 < count ? first + i + 1 : later) * STRIPE), block(scratch, i));
    }

    void add_many_outputs(const Segment& s, int64_t first, int64_t count, int64_t later, const Scratch& scratch) const {
        const int64_t step = step_of(weight);
        const auto reach = [&](int64_t k) { return k + step < outer ? k + step : outer; };
        for (int64_t k = 0; k < outer; k += step) {
            const Left left = lay_routes(x, s, k, reach(k), weight, scratch);
            for (int64_t i = 0; i < count; ++i) {
                const bool more = i + 1 < count, last = !more && k + step >= outer;
                const int64_t next = more ? first + i + 1 : last ? later : first, from = more ? k : last ? 0 : k + step;
                add_outputs(weight, s, (first + i) * STRIPE, k, reach(k), left, scratch, block(scratch, i),
                            outputs_ahead(weight, s.expert, next * STRIPE, from, reach(from)));
            }
        }
    }

    void write_row(int64_t row, int64_t column, float* sums) const {
        const int64_t left = weight.rows - column, width = left < STRIPE ? left : STRIPE;
        if (given(bias)) {
            const bool narrow = bias.dtype == GS_BF16;
            for (int64_t j = 0; j < width; ++j) {
                const int64_t at = (column + j) * bias.strides[0];
                sums[j] += narrow ? bfloat16(static_cast<const uint16_t*>(bias.data)[at])
                                  : static_cast<const float*>(bias.data)[at];
            }
        }
        write(static_cast<char*>(y.data) + (row * y.strides[0] + column) * (bf16 ? 2 : 4), bf16, width, sums);
    }
};

}  // namespace gs::GS_LEVEL
