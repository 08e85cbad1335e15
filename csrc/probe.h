// Probes of a level's peak rates, in operations and in bytes; each csrc/isa/<level>.cpp compiles its own copy.
#include <immintrin.h>

#include "table.h"

namespace gs::GS_LEVEL {
namespace {

// Runs rounds of `step` on twelve sums at once, which hides an instruction's latency and touches no memory.
// `operations` counts those of one step: two per multiply-add. The sums are twelve variables, because gcc 12 would keep
// an array on the stack; the empty asm prevents it from removing the unused results.
template <class Vector, class Step>
[[gnu::always_inline]] inline int64_t peak(int64_t rounds, int64_t operations, Vector zero, Step step) {
#define GS_TWELVE(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#define GS_DECLARE(n) Vector sum##n = zero;
#define GS_STEP(n)         \
    sum##n = step(sum##n); \
    __asm__ volatile("" : "+v"(sum##n));
    GS_TWELVE(GS_DECLARE)
    for (int64_t i = 0; i < rounds; ++i) {
        GS_TWELVE(GS_STEP)
    }
#undef GS_STEP
#undef GS_DECLARE
#undef GS_TWELVE
    return rounds * 12 * operations;
}

// Reads all bytes once, four vectors at a time; the sum depends on each byte.
template <class Vector, class Load, class Add>
[[gnu::always_inline]] inline void read_all(const void* data, size_t bytes, Vector (&sums)[4], Load load, Add add) {
    const char* at = static_cast<const char*>(data);
    for (const char* end = at + bytes; at < end; at += 4 * sizeof(Vector))
        for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], load(at + i * sizeof(Vector)));
}

}  // namespace
}  // namespace gs::GS_LEVEL
