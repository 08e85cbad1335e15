// The kernels of one level, as pointers. csrc/isa/<level>.cpp fills in what the level does better than those below it;
// what it leaves alone stays as the level below has filled it, and null is what no level up to this one can do.
//
// Each of those files is compiled with instructions that not every machine has. Nothing in it may be shared with the
// rest of the library by the linker: everything lives in the level's own namespace, and no function of a standard
// header may be instantiated there (tests/native looks for weak symbols).
#pragma once

#include <cstddef>
#include <cstdint>

#include "goldsmith.h"

namespace gs {

class Plan;

// What Table::products takes: 32 rows, or 32 outputs, of 2048 inputs in bfloat16.
constexpr int64_t STRIPE_STEPS = 64, STRIPE_BYTES = STRIPE_STEPS * 2048;

struct Table {
    // Reads all bytes (a multiple of 64) and returns something that depends on them.
    uint64_t (*read)(const void* data, size_t bytes);
    // Operations done in `rounds` rounds, by gs_probe; [GS_READ] stays null.
    int64_t (*peak[6])(int64_t rounds);
    // Operations of the product of pairs * 32 rows with a stripe of weights, STRIPE_BYTES; `next`, unless null, is
    // fetched meanwhile. `still`: the same 4 KiB of both at every step.
    int64_t (*products)(const char* rows, int64_t pairs, const char* stripe, const char* next, bool still);
    int64_t moe_rows;  // the most routes of a segment of a plan
    void (*moe_forward)(const gs_moe_args& args, const Plan& plan);
    void (*moe_backward)(const gs_moe_args& args, const Plan& plan);
};

// The kernels of the chosen level.
const Table& table();

// clang-format off
namespace scalar { void fill(Table& table); }
namespace avx2 { void fill(Table& table); }
namespace avx512 { void fill(Table& table); }
namespace avx512_vnni { void fill(Table& table); }
namespace avx512_bf16 { void fill(Table& table); }
namespace amx { void fill(Table& table); }
// clang-format on

}  // namespace gs
