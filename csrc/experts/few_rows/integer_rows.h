// The rows of a call in 8 bits, when all segments are few: x rounded once per token, h once per route. The rounding is
// that of int8/rows.h; only the order in memory differs.
#pragma once

#include "../vectors/call.h"
#include "integers.h"

namespace gs::GS_LEVEL {

// Stores sixteen numbers in the order of a word's bytes.
template <class Code> void store_bytes(int8_t* to, Words numbers) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtsepi32_epi8(numbers.v);
#else
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(numbers.a, numbers.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
#endif
    if constexpr (Code::per_word == 8)
        bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
    uint32_t lanes[LANES];
    store_words(lanes, numbers);
    for (int i = 0; i < LANES; ++i) to[i] = static_cast<int8_t>(lanes[i / 8 * 8 + byte_order<Code>(i % 8)]);
#endif
}

// Rounds columns [begin, end) with one scale and returns their sum; writes up to 15 bytes after the last number.
template <class Code>
int32_t round_bytes(const Rows& rows, int64_t row, int64_t begin, int64_t end, float scale, int8_t* to) {
    alignas(64) float values[PART];
    const Floats divisor = all(scale == 0 ? 1 : scale);
    Words sum = all_words(0);
    for (int64_t k = begin; k < end; k += PART) {
        const int64_t last = k + PART < end ? k + PART : end;
        read_values(rows, row, k, last, values);
        for (int64_t j = 0; j < last - k; j += LANES) {
            const Words numbers = scale != scale ? all_words(0) : nearest(load(values + j), divisor);
            sum = sum + numbers;
            store_bytes<Code>(to + k - begin + j, numbers);
        }
    }
    return total(sum);
}

// The rows of a segment for the kernels of few rows: floats (or pairs), or integers.
struct FewRows {
    Lines lines;
    IntegerLine integers[MOST_FEW] = {};
    bool in_8_bits = false;
};

inline void add_few_rows(const gs_matrix& m, const Segment& s, int64_t row, const FewRows& rows, const char* following,
                         float* sums) {
    if (rows.in_8_bits)
        add_few_integers(m, s.expert, row, rows.integers, s.count, following, sums);
    else
        add_few(m, s.expert, row, rows.lines, s.count, following, sums);
}

class FewIntegers {
public:
    explicit FewIntegers(Call& call)
        : call_(call),
          on_(call.args.int8 > 0 && Call::all_few(call.grouping)),
          x_(call.arena.shared<char>(on_ ? call.args.tokens * Shape::of(call.args.slices[0].gate).bytes() : 0)),
          h_(call.arena.shared<char>(on_ ? call.grouping.routes * bytes_of_down(call.args.slice_count) : 0)) {}

    bool on() const { return on_; }

    void round_x() const {
        if (call_.args.slice_count == 0) return;
        const gs_matrix& m = call_.args.slices[0].gate;
        const int64_t apart = Shape::of(m).bytes();
        each(call_.args.tokens, call_.outer,
             [&](int64_t t) { round(call_.x, t * call_.slots, 0, call_.outer, m, x_.data() + t * apart); });
    }

    // Rounds the rows of h, which are in the order of the groups.
    void round_h(const Rows& h) const {
        const int64_t apart = bytes_of_down(call_.args.slice_count);
        each(call_.grouping.routes, call_.inner, [&](int64_t place) {
            for (int64_t i = 0; i < call_.args.slice_count; ++i) {
                const gs_slice& slice = call_.args.slices[i];
                round(h, place, slice.begin, slice.end, slice.down, h_.data() + place * apart + bytes_of_down(i));
            }
        });
    }

    // The rows of a segment, for gate and up.
    FewRows rows_of_x(const Segment& s) const {
        const Shape shape = Shape::of(call_.args.slices[0].gate);
        FewRows rows{{}, {}, true};
        for (int64_t i = 0; i < s.count; ++i)
            rows.integers[i] = shape.line(x_.data() + call_.grouping.order[s.begin + i] / call_.slots * shape.bytes());
        return rows;
    }

    // The same for slice `at` of down.
    FewRows rows_of_h(const Segment& s, int64_t at) const {
        const Shape shape = Shape::of(call_.args.slices[at].down);
        const int64_t apart = bytes_of_down(call_.args.slice_count);
        FewRows rows{{}, {}, true};
        for (int64_t i = 0; i < s.count; ++i)
            rows.integers[i] = shape.line(h_.data() + (s.begin + i) * apart + bytes_of_down(at));
        return rows;
    }

private:
    // A line in memory: numbers, scales, sums.
    struct Shape {
        int64_t numbers, groups;  // bytes of the numbers with padding

        static Shape of(const gs_matrix& m) {
            constexpr int64_t written_after_the_last = 16;
            return {(m.cols + written_after_the_last + 63) / 64 * 64, (m.cols + m.group - 1) / m.group};
        }
        int64_t bytes() const { return (numbers + 8 * groups + 63) / 64 * 64; }
        IntegerLine line(const char* at) const {
            const auto* scales = reinterpret_cast<const float*>(at + numbers);
            return {reinterpret_cast<const int8_t*>(at), scales, reinterpret_cast<const int32_t*>(scales + groups)};
        }
    };

    // Rounds columns [begin, end) of a row for a matrix that takes them. Its groups may share their scales of the row.
    void round(const Rows& rows, int64_t row, int64_t begin, int64_t end, const gs_matrix& m, char* to) const {
        const int64_t shared = call_.args.int8 < rows.columns ? call_.args.int8 : rows.columns;
        const Shape shape = Shape::of(m);
        auto* numbers = reinterpret_cast<int8_t*>(to);
        auto* scales = reinterpret_cast<float*>(to + shape.numbers);
        auto* sums = reinterpret_cast<int32_t*>(scales + shape.groups);
        std::memset(numbers + m.cols, 0, static_cast<size_t>(shape.numbers - m.cols));
        with_octets(m.format, [&](auto code) {
            using Code = decltype(code);
            float scale = 0;
            for (int64_t g = 0, known = -1; g < shape.groups; ++g) {
                const int64_t from = begin + g * m.group, last = from + m.group < end ? from + m.group : end;
                if (from / shared != known) {
                    known = from / shared;
                    const int64_t reach = (known + 1) * shared;
                    scale = scale_of(rows, row, known * shared, reach < rows.columns ? reach : rows.columns);
                }
                scales[g] = scale;
                sums[g] = round_bytes<Code>(rows, row, from, last, scale, numbers + (from - begin));
            }
        });
    }

    // Calls action for each of `count` rows; a few rows alone, which take less time than others need to begin.
    template <class Action> static void each(int64_t count, int64_t columns, const Action& action) {
        if (count * columns > 1 << 13) return parallel_for(count, [&](int64_t i, int) { action(i); });
        for (int64_t i = 0; i < count; ++i) action(i);
    }

    // Bytes of the lines of down's slices before this one.
    int64_t bytes_of_down(int64_t slice) const {
        int64_t bytes = 0;
        for (int64_t i = 0; i < slice; ++i) bytes += Shape::of(call_.args.slices[i].down).bytes();
        return bytes;
    }

    Call& call_;
    const bool on_;
    const Region<char> x_, h_;
};

}  // namespace gs::GS_LEVEL
