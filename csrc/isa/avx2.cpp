// Level avx2: AVX2, FMA and F16C; eight floats per register.
#define GS_LEVEL avx2
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::avx2 {
namespace {

uint64_t read(const void* data, size_t bytes) {
    __m256i sums[4] = {};
    read_all(
        data, bytes, sums, [](const char* at) { return _mm256_loadu_si256((const __m256i*)at); },
        [](__m256i a, __m256i b) { return _mm256_add_epi64(a, b); });
    const __m256i four = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    const __m128i sum = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return uint64_t(_mm_cvtsi128_si64(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum))));
}

int64_t fma(int64_t rounds) {
    const __m256 a = _mm256_set1_ps(1e-3f);
    return peak(rounds, 16, a, [a](__m256 sum) { return _mm256_fmadd_ps(a, sum, a); });
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

}  // namespace gs::avx2
