// Dropout masks of LoRA: Philox4x32-10 with counter (feature / 4, token, slot, projection), as in experts/dropout.py.
#pragma once

#include "../../goldsmith.h"
#include "simd.h"

namespace gs::GS_LEVEL {

struct Dropout {
    uint64_t seed, threshold;
    const int64_t* numbers;  // of the tokens, or null
    float keep;              // 1 / (1 - p)
    uint32_t projection;
    bool on;
};

enum Projection : uint32_t { GATE = 0, UP = 1, DOWN = 2 };

inline Dropout dropout_of(const gs_moe_args& args, Projection projection) {
    const double p = args.dropout;
    const uint64_t threshold = static_cast<uint64_t>(p * 0x1p32 + 0.5);
    return {args.seed, threshold, args.numbers, static_cast<float>(1 / (1 - p)), projection, p > 0};
}

inline void philox(uint32_t c[4], uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t a = static_cast<uint64_t>(c[0]) * 0xD2511F53u, b = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
        const uint32_t c1 = c[1], c3 = c[3];
        c[0] = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c[1] = static_cast<uint32_t>(b);
        c[2] = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c[3] = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// row[i] *= mask of feature begin + i
inline void drop(const Dropout& how, int64_t token, int64_t slot, int64_t begin, int64_t end, float* row) {
    const int64_t number = how.numbers ? how.numbers[token] : token;
    for (int64_t block = begin / 4; block * 4 < end; ++block) {
        uint32_t words[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(number), static_cast<uint32_t>(slot),
                             how.projection};
        philox(words, how.seed);
        for (int i = 0; i < 4; ++i) {
            const int64_t feature = 4 * block + i;
            if (feature >= begin && feature < end) row[feature - begin] *= words[i] >= how.threshold ? how.keep : 0.0f;
        }
    }
}

}  // namespace gs::GS_LEVEL
