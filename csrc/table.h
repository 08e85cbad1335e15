// The kernels of one level, as pointers. csrc/isa/<level>.cpp sets those that the level does better than lower ones and
// inherits the others; null means that no level up to this one has the kernel.
//
// These files are compiled with instructions that not every machine has, so the linker must not share their code with
// the rest of the library: everything is in the level's own namespace, and they must not instantiate functions of
// standard headers (tests/native looks for weak symbols).
#pragma once

#include <cstddef>
#include <cstdint>

#include "goldsmith.h"

namespace gs {

class Grouping;

// The size of the operands of Table::products: 32 rows, or 32 outputs, of 2048 inputs in bfloat16.
constexpr int64_t STRIPE_STEPS = 64, STRIPE_BYTES = STRIPE_STEPS * 2048;

struct Table {
    // Reads all bytes (a multiple of 64) and returns something that depends on them.
    uint64_t (*read)(const void* data, size_t bytes);
    // Runs `rounds` rounds and returns the operations done, indexed by gs_probe; [GS_READ] stays null.
    int64_t (*peak[6])(int64_t rounds);
    // Multiplies pairs * 32 rows with a stripe of weights (STRIPE_BYTES) and returns the operations; prefetches `next`
    // unless it is null. still: every step uses the same 4 KiB of both operands.
    int64_t (*products)(const char* rows, int64_t pairs, const char* stripe, const char* next, bool still);
    int64_t moe_rows;  // the most routes of a segment of a grouping
    void (*moe_forward)(const gs_moe_args& args, const Grouping& grouping);
    void (*moe_backward)(const gs_moe_args& args, const Grouping& grouping);
    // rows: x and y as those of a layer with one expert
    void (*linear)(const gs_linear_args& args, const gs_moe_args& rows, const Grouping& grouping);
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
