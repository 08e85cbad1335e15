// Rows rounded to 8-bit integers, part by part: the left side of an integer product.
//
//     scale = amax / 127 of a group, number = nearest(value / scale), ties to even; a group with NaN or Inf has scale
//     NaN and numbers 0, and so its row comes out NaN
#pragma once

#include "../vectors/multiply.h"
#include "../vectors/rows.h"
#include "words.h"

namespace gs::GS_LEVEL {

constexpr int64_t PART = OCTETS == 4 ? 512 : 256;  // numbers per part, so that 16 KiB of weights stay in L1

// A part of a row. Its size does not depend on the matrix, so a product of many rows needs one address in a register
// and constant offsets.
struct Lot {
    struct Group {
        float scale;
        int32_t start;  // initial value of the group's sums: the correction for the bias of unsigned weights
    };

    alignas(64) Octet numbers[PART];
    Group groups[PART / UNIT +
                 (UNIT == 64 ? 0 : 8)];  // 9, 13 or 17 lines per lot, so that lots do not map to the same cache sets
};
static_assert(sizeof(Lot) / 64 % 2 == 1);

// Some whole groups, or a part of one group.
struct Part {
    int64_t index, group, groups, from, length;
    bool first, last;

    bool begins() const { return index == 0; }
};

// The division of a matrix's inputs into groups and parts.
struct Groups {
    int64_t inputs, count, length;  // length: numbers of a group with padding

    static Groups of(const gs_matrix& m) {
        const int64_t length = (m.group + UNIT - 1) / UNIT * UNIT;
        return {m.group, (m.cols + m.group - 1) / m.group, length};
    }
    int64_t parts() const {
        if (count == 0) return 0;
        if (length > PART) return count * ((length + PART - 1) / PART);
        const int64_t each = PART / length;
        return (count + each - 1) / each;
    }
    Part begin() const { return at(0, 0, 0); }
    Part after(const Part& p) const {
        return p.last ? at(p.index + 1, p.group + p.groups, 0) : at(p.index + 1, p.group, p.from + PART);
    }

    // Calls action(part, next part); the first part follows the last one.
    template <class Action> void each_part(const Action& action) const {
        for (Part part = begin(), next; part.group < count; part = next) {
            next = after(part);
            action(part, next.group < count ? next : begin());
        }
    }

private:
    Part at(int64_t index, int64_t group, int64_t from) const {
        if (length <= PART) {
            const int64_t left = count - group, each = PART / length;
            return {index, group, left < each ? left : each, 0, length, true, true};
        }
        const int64_t left = length - from, size = left < PART ? left : PART;
        return {index, group, 1, from, size, from == 0, size == left};
    }
};

template <class Action> void with_octets(gs_format format, const Action& action) {
    switch (format) {
        case GS_INT8: return action(Int8{});
        case GS_INT4: return action(Int4{});
        default: return action(Int4Asym{});
    }
}

// Reads values [begin, end) of a row and pads with zeros to a whole register.
inline void read_values(const Rows& rows, int64_t row, int64_t begin, int64_t end, float* to) {
    const int64_t count = end - begin, whole = (count + LANES - 1) / LANES * LANES;
    read(rows.at(row, begin), rows.bf16, count, to);
    for (int64_t j = count; j < whole; ++j) to[j] = 0;
}

// The scale of columns [begin, end), found by comparing bits: those of NaN and Inf are the greatest.
inline float scale_of(const Rows& rows, int64_t row, int64_t begin, int64_t end) {
    alignas(64) float values[PART];
    Words most = all_words(0);
    for (int64_t k = begin; k < end; k += PART) {
        const int64_t last = k + PART < end ? k + PART : end;
        read_values(rows, row, k, last, values);
        for (int64_t j = 0; j < last - k; j += LANES) most = greater(most, as_words(load(values + j)) & 0x7fffffffu);
    }
    const int32_t bits = greatest(most);
    if (bits >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    float largest;
    std::memcpy(&largest, &bits, 4);
    return largest / 127;
}

// nearest(value / divisor), ties to even
inline Words nearest(Floats values, Floats divisor) {
    return to_words(lesser(all(127), greater(all(-127), round(values / divisor))));
}

// Rounds columns [begin, end) to `length` numbers, padded with zeros; returns their sum.
template <class Code>
int32_t round_columns(const Rows& rows, int64_t row, int64_t begin, int64_t end, float scale, int64_t length,
                      Octet* to) {
    alignas(64) float values[PART];
    const int64_t count = scale != scale || end < begin ? 0 : end - begin;
    read_values(rows, row, begin, begin + count, values);
    const Floats divisor = all(scale == 0 ? 1 : scale);
    Words sum = all_words(0);
    int64_t k = 0;
    for (; k < count; k += LANES) {
        const Words numbers = nearest(load(values + k), divisor);
        sum = sum + numbers;
        if (k + LANES <= length) {
            store_numbers<Code>(to + k, numbers);
        } else {
            Octet last[LANES];
            store_numbers<Code>(last, numbers);
            std::memcpy(to + k, last, static_cast<size_t>(length - k) * sizeof(Octet));
        }
    }
    if (k < length) std::memset(to + k, 0, static_cast<size_t>(length - k) * sizeof(Octet));
    return total(sum);
}

// Rounds columns [begin, end) of a row to lots, `apart` lots from one another. Each `shared` columns have one scale;
// they can be more than a group of the matrix, whose inputs may be a slice of them.
template <class Code>
void round_row(const Rows& rows, int64_t row, int64_t begin, int64_t end, int64_t shared, const Groups& groups,
               Lot* lots, int64_t apart) {
    int64_t known = -1;
    float scale = 0;
    int32_t* start = nullptr;
    for (Part part = groups.begin(); part.group < groups.count; part = groups.after(part), lots += apart)
        for (int64_t i = 0; i < part.groups; ++i) {
            const int64_t group = begin + (part.group + i) * groups.inputs, from = group + part.from;
            int64_t to = group + groups.inputs < end ? group + groups.inputs : end;
            if (from + part.length < to) to = from + part.length;
            if (group / shared != known) {
                known = group / shared;
                const int64_t last = (known + 1) * shared;
                scale = scale_of(rows, row, known * shared, last < rows.columns ? last : rows.columns);
            }
            if (part.first) start = &lots->groups[i].start, *start = 0;
            lots->groups[i].scale = scale;
            *start -= BIAS<Code> *
                      round_columns<Code>(rows, row, from, to, scale, part.length, lots->numbers + i * part.length);
        }
}

}  // namespace gs::GS_LEVEL
