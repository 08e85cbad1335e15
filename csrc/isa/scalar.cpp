// Level scalar: SSE2, which every x86-64 has; the plain C++ that defines what the other levels compute.
#define GS_LEVEL scalar
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::scalar {
namespace {

uint64_t read(const void* data, size_t bytes) {
    __m128i sums[4] = {};
    read_all(
        data, bytes, sums, [](const char* at) { return _mm_loadu_si128((const __m128i*)at); },
        [](__m128i a, __m128i b) { return _mm_add_epi64(a, b); });
    const __m128i sum = _mm_add_epi64(_mm_add_epi64(sums[0], sums[1]), _mm_add_epi64(sums[2], sums[3]));
    return uint64_t(_mm_cvtsi128_si64(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum))));
}

int64_t fma(int64_t rounds) {
    const __m128 a = _mm_set1_ps(1e-3f);
    return peak(rounds, 8, a, [a](__m128 sum) { return _mm_add_ps(_mm_mul_ps(a, sum), a); });
}

}  // namespace

void fill(Table& table) {
    table.moe_rows = ROWS;
    table.moe_forward = moe_forward;
    table.moe_backward = moe_backward;
    table.linear = linear;
    table.read = read;
    table.peak[GS_FMA] = fma;
}

}  // namespace gs::scalar
