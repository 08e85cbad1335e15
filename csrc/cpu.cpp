#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// The registers that the operating system saves at a context switch; without them CPUID's bits are not sufficient.
uint64_t saved_state() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

constexpr bool has(uint64_t word, uint64_t bits) { return (word & bits) == bits; }
constexpr uint64_t bit(int n) { return uint64_t(1) << n; }
constexpr uint64_t amx = bit(22) | bit(24) | bit(25), tiles_saved = 0x60000;

Processor look() {
    const Registers vendor = cpuid(0), basic = cpuid(1), more = cpuid(7), extra = cpuid(7, 1);
    Processor p{};
    p.intel = vendor.ebx == signature_INTEL_ebx && vendor.ecx == signature_INTEL_ecx;
    p.model = (basic.eax >> 4 & 15) | (basic.eax >> 12 & 0xf0);
    p.basic = basic.ecx, p.more[0] = more.ebx, p.more[1] = more.ecx, p.more[2] = more.edx, p.extra = extra.eax;
    p.saved = has(basic.ecx, bit(27)) ? saved_state() : 0;
#if defined(GS_TILES_IN_SOFTWARE)
    p.more[2] |= amx, p.saved |= tiles_saved, p.tiles = true;
#else
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (has(p.more[2], amx) && has(p.saved, tiles_saved))
        p.tiles = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#endif
    return p;
}

// The reason why AMX is unavailable, or null.
const char* no_tiles(const Processor& p) {
    if (!has(p.more[2], amx)) return "the processor has no AMX (tile, int8, bf16)";
    if (!has(p.saved, tiles_saved) || !p.tiles) return "the operating system does not give this process the AMX tiles";
    return nullptr;
}

}  // namespace

Machine level_of(const Processor& p) {
    if (!has(p.basic, bit(12) | bit(28) | bit(29)) || !has(p.more[0], bit(5)))
        return {Level::scalar, "the processor has no AVX2, FMA or F16C"};
    if (!has(p.saved, 0x6)) return {Level::scalar, "the operating system does not save AVX registers"};

    if (!has(p.more[0], bit(16) | bit(17) | bit(30) | bit(31)))
        return {Level::avx2, "the processor has no AVX-512 (F, BW, DQ, VL)"};
    if (!has(p.saved, 0xe6)) return {Level::avx2, "the operating system does not save AVX-512 registers"};

    if (!has(p.more[1], bit(11))) return {Level::avx512, "the processor has no AVX512_VNNI"};
    if (!has(p.extra, bit(5))) return {Level::avx512_vnni, "the processor has no AVX512_BF16"};

    const char* why = no_tiles(p);
    if (!why) return {Level::amx, ""};
    // On processors with AMX, Intel runs this instruction on one port at half the rate: 109 to 112 GFLOP/s, but 217 to
    // 223 in float32 (Xeon, model 167); 86 and 171 (the host of an H100). Cooper Lake, model 85, runs it at full rate.
    constexpr uint32_t cooper_lake = 85;
    if (p.intel && p.model != cooper_lake)
        return {Level::avx512_vnni, "this processor's bfloat16 products take twice as long as its float32 products"};
    return {Level::avx512_bf16, why};
}

const Machine& machine() {
    static const Machine found = level_of(look());
    return found;
}

}  // namespace gs
