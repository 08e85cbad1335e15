// Detection of the instructions that this processor has and the operating system lets us use.
#pragma once

#include <cstdint>

namespace gs {

enum class Level : int { scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx };

inline constexpr const char* level_names[] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};

struct Machine {
    Level level;
    const char* why_not_higher;  // "" at the highest level
};

// CPUID's answers (leaf 1 ecx; leaf 7 ebx, ecx, edx; leaf 7.1 eax), the registers that the operating system saves, and
// whether it gives this process tiles.
struct Processor {
    bool intel, tiles;
    uint32_t model, basic, more[3], extra;
    uint64_t saved;
};

// The highest level that makes this processor faster.
Machine level_of(const Processor& processor);

// Detected once. AMX tiles need the kernel's permission, which this requests for the whole process.
const Machine& machine();

}  // namespace gs
