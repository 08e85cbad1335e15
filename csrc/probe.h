// What a level can reach, in instructions and in bytes: each csrc/isa/<level>.cpp includes this and compiles its own.
#include <immintrin.h>

#include "table.h"

namespace gs::GS_LEVEL {
namespace {

// Rounds of `step` on twelve sums at once, which covers an instruction's latency and touches no memory. `operations`
// are those of one step: two for each product that is added.
template <class Vector, class Step>
[[gnu::always_inline]] inline int64_t peak(int64_t rounds, int64_t operations, Vector zero, Step step) {
    Vector sums[12];
    for (Vector& sum : sums) sum = zero;
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
        for (Vector& sum : sums) {
            sum = step(sum);
            __asm__ volatile("" : "+v"(sum));  // or the optimiser would notice that nobody wants the result
        }
    }
    return rounds * 12 * operations;
}

// All bytes once, four cache lines at a time; the sum depends on each of them.
template <class Vector, class Load, class Add>
[[gnu::always_inline]] inline void read_all(const void* data, size_t bytes, Vector (&sums)[4], Load load, Add add) {
    const char* at = static_cast<const char*>(data);
    for (const char* end = at + bytes; at < end; at += 4 * sizeof(Vector))
        for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], load(at + i * sizeof(Vector)));
}

}  // namespace
}  // namespace gs::GS_LEVEL
