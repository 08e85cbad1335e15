#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>

namespace gs {
namespace {

struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Registers r{};
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// The registers that the operating system saves at a context switch; a set bit of CPUID alone promises nothing.
uint64_t saved_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

constexpr bool has(uint64_t word, uint64_t bits) { return (word & bits) == bits; }
constexpr uint64_t bit(int n) { return uint64_t(1) << n; }

Machine find() {
    const Registers basic = cpuid(1), more = cpuid(7), extra = cpuid(7, 1);
    const uint64_t saved = has(basic.ecx, bit(27)) ? saved_state() : 0;

    if (!has(basic.ecx, bit(12) | bit(28) | bit(29)) || !has(more.ebx, bit(5)))
        return {Level::scalar, "the processor has no AVX2, FMA or F16C"};
    if (!has(saved, 0x6)) return {Level::scalar, "the operating system does not save AVX registers"};

    if (!has(more.ebx, bit(16) | bit(17) | bit(30) | bit(31)))
        return {Level::avx2, "the processor has no AVX-512 (F, BW, DQ, VL)"};
    if (!has(saved, 0xe6)) return {Level::avx2, "the operating system does not save AVX-512 registers"};

    if (!has(more.ecx, bit(11))) return {Level::avx512, "the processor has no AVX512_VNNI"};
    if (!has(extra.eax, bit(5))) return {Level::avx512_vnni, "the processor has no AVX512_BF16"};

#if !defined(GS_TILES_IN_SOFTWARE)
    if (!has(more.edx, bit(22) | bit(24) | bit(25)))
        return {Level::avx512_bf16, "the processor has no AMX (tile, int8, bf16)"};
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (!has(saved, 0x600e6) || syscall(SYS_arch_prctl, request_permission, tile_data) != 0)
        return {Level::avx512_bf16, "the operating system does not give AMX's tiles to this process"};
#endif
    return {Level::amx, ""};
}

}  // namespace

const Machine& machine() {
    static const Machine found = find();
    return found;
}

}  // namespace gs
