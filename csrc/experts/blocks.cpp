// Reads blocks of a scale and 32 codes, as GGUF files hold them, into codes and scales in rows, or into numbers. Bound
// by memory with SSE2, which every x86-64 has, so this is compiled once, for every level.
#include <emmintrin.h>

#include <cstring>

#include "../error.h"

namespace {

constexpr int64_t CODES = 32;  // of a block
constexpr int64_t HALF = CODES / 2;

__m128i loaded(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

void store(uint8_t* out, __m128i bytes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes); }

// 16 nibbles, each in a byte, two to a byte: the first one low, in the low bytes of 8 words of 16 bits
__m128i in_pairs(__m128i nibbles) {
    return _mm_and_si128(_mm_or_si128(nibbles, _mm_srli_epi16(nibbles, 4)), _mm_set1_epi16(0xFF));
}

// The low nibbles of all bytes are the first 16 codes, the high ones the others
void write_nibbles(const uint8_t* bytes, uint8_t flip, uint8_t* out) {
    const __m128i both = loaded(bytes), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    store(out, _mm_xor_si128(_mm_packus_epi16(in_pairs(low), in_pairs(high)), _mm_set1_epi8(char(flip))));
}

uint16_t half_of(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, sizeof half);
    return half;
}

// Exact, also where the processor takes subnormal floats for zero
float widened(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
    if (exponent == 0) return (sign ? -1.0F : 1.0F) * float(fraction) * 0x1p-24F;
    const uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

void write_numbers(const uint8_t* block, bool nibbles, float* out) {
    const float scale = widened(half_of(block));
    const uint8_t* const bytes = block + 2;
    if (nibbles) {
        for (int64_t i = 0; i < HALF; ++i) out[i] = scale * float(int(bytes[i] & 15) - 8);
        for (int64_t i = 0; i < HALF; ++i) out[HALF + i] = scale * float(int(bytes[i] >> 4) - 8);
    } else {
        for (int64_t i = 0; i < CODES; ++i) out[i] = scale * float(int8_t(bytes[i]));
    }
}

bool finite(const uint8_t* scale, int64_t bytes) {
    return bytes == 1 ? *scale != 255 : (half_of(scale) & 0x7C00) != 0x7C00;
}

void check(const gs_block_args& args) {
    gs::check_size(&args);
    const int64_t bytes = args.nibbles ? HALF : CODES;
    if ((args.scale_bytes != 1 && args.scale_bytes != 2) || args.block_bytes != args.scale_bytes + bytes)
        gs::fail(GS_INTERNAL, "blocks of %lld bytes with scales of %lld, expected scales of 1 or 2 and %lld for codes",
                 static_cast<long long>(args.block_bytes), static_cast<long long>(args.scale_bytes),
                 static_cast<long long>(bytes));
    if (args.numbers && args.scale_bytes != 2) gs::fail(GS_INTERNAL, "numbers need scales in float16");
}

}  // namespace

gs_status gs_read_blocks(gs_block_args* args) {
    return gs::guarded([&] {
        check(*args);
        const auto* block = static_cast<const uint8_t*>(args->blocks);
        if (args->numbers) {
            for (int64_t b = 0; b < args->count; ++b, block += args->block_bytes)
                write_numbers(block, args->nibbles != 0, args->numbers + b * CODES);
            return;
        }
        const int64_t scale_bytes = args->scale_bytes, code_bytes = args->block_bytes - scale_bytes;
        auto *codes = static_cast<uint8_t*>(args->codes), *scales = static_cast<uint8_t*>(args->scales);
        int64_t infinite = 0;
        for (int64_t b = 0; b < args->count; ++b, block += args->block_bytes) {
            infinite += !finite(block, scale_bytes);
            std::memcpy(scales + b * scale_bytes, block, size_t(scale_bytes));
            if (args->nibbles)
                write_nibbles(block + scale_bytes, uint8_t(args->flip), codes + b * code_bytes);
            else
                std::memcpy(codes + b * code_bytes, block + scale_bytes, CODES);
        }
        args->infinite = infinite;
    });
}
