// Level avx512_bf16: an instruction that adds two bfloat16 products to each of sixteen floats.
#define GS_LEVEL avx512_bf16
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::avx512_bf16 {
namespace {

int64_t dot(int64_t rounds) {
    const __m512 one = _mm512_set1_ps(1e-3f);
    const __m512bh a = _mm512_cvtne2ps_pbh(one, one);
    return peak(rounds, 64, one, [a](__m512 sum) { return _mm512_dpbf16_ps(sum, a, a); });
}

}  // namespace

void fill(Table& table) {
    table.peak[GS_DOT_BF16] = dot;
    table.moe_rows = ROWS;
    table.moe_forward = moe_forward;
    table.moe_backward = moe_backward;
    table.linear = linear;
}

}  // namespace gs::avx512_bf16
