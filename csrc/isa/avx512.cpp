// Level avx512: AVX-512 F, BW, DQ and VL; sixteen floats per register.
#define GS_LEVEL avx512
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::avx512 {
namespace {

uint64_t read(const void* data, size_t bytes) {
    __m512i sums[4] = {};
    read_all(
        data, bytes, sums, [](const char* at) { return _mm512_loadu_si512(at); },
        [](__m512i a, __m512i b) { return _mm512_add_epi64(a, b); });
    return uint64_t(_mm512_reduce_or_epi64(
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]))));
}

int64_t fma(int64_t rounds) {
    const __m512 a = _mm512_set1_ps(1e-3f);
    return peak(rounds, 32, a, [a](__m512 sum) { return _mm512_fmadd_ps(a, sum, a); });
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

}  // namespace gs::avx512
