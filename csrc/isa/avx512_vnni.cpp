// Level avx512_vnni: an instruction that adds four byte products to each of sixteen int32.
#define GS_LEVEL avx512_vnni
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::avx512_vnni {
namespace {

int64_t dot(int64_t rounds) {
    const __m512i a = _mm512_set1_epi8(1);
    return peak(rounds, 128, a, [a](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, a); });
}

}  // namespace

void fill(Table& table) {
    table.moe_rows = ROWS;
    table.moe_forward = moe_forward;
    table.moe_backward = moe_backward;
    table.linear = linear;
    table.peak[GS_VNNI] = dot;
}

}  // namespace gs::avx512_vnni
