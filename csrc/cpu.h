// Which instructions this processor has and the operating system lets us use.
#pragma once

namespace gs {

enum class Level : int { scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx };

inline constexpr const char* level_names[] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};

struct Machine {
    Level level;
    const char* why_not_higher;  // "" at the highest level
};

// Found once. AMX's tiles need leave of the kernel, which this asks for, on behalf of the whole process.
const Machine& machine();

}  // namespace gs
