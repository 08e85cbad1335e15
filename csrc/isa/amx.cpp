// Level amx: products of tiles, 16 rows by 64 bytes times 64 bytes by 16 columns, in bfloat16 or int8.
#define GS_LEVEL amx
#include "../experts/moe.h"
#include "../probe.h"

namespace gs::amx {
namespace {

#if !defined(GS_TILES_IN_SOFTWARE)

struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Configures eight tiles: four sums and two by two operands, as in a 32 x 32 kernel.
void begin() {
    Shape shape;
    for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = 16;
    // gcc 12 assumes that the instruction reads only the first eight bytes; this tells it about the others
    __asm__ volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
}

int64_t bf16(int64_t rounds) {
    begin();
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return rounds * 4 * (2 * 16 * 16 * 32);
}

int64_t int8(int64_t rounds) {
    begin();
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return rounds * 4 * (2 * 16 * 16 * 64);
}

// The inner loop of a layer's products.
int64_t products(const char* rows, int64_t pairs, const char* stripe, const char* next, bool still) {
    alignas(64) float sums[32 * 32];
    const Tiles configured;
    const int64_t panel = STRIPE_BYTES / 2, step = still ? 0 : TILE_BYTES,
                  lines = next ? (STRIPE_BYTES / 64 + pairs * STRIPE_STEPS - 1) / (pairs * STRIPE_STEPS) : 0;
    for (int64_t pair = 0; pair < pairs; ++pair, rows += STRIPE_BYTES) {
        const Link link{rows, rows + panel, stripe, stripe + panel, step, step, STRIPE_STEPS};
        dot<ON_THE_RIGHT>(&link, 1, 1, true, true,
                          next ? Ahead{next + pair * lines * 64 * STRIPE_STEPS, lines} : Ahead{}, sums);
    }
    return pairs * STRIPE_STEPS * 4 * (2 * 16 * 16 * 32);
}

#endif

}  // namespace

void fill(Table& table) {
    table.moe_rows = ROWS;
    table.moe_forward = moe_forward;
    table.moe_backward = moe_backward;
    table.linear = linear;
#if !defined(GS_TILES_IN_SOFTWARE)
    table.peak[GS_AMX_BF16] = bf16;
    table.peak[GS_AMX_INT8] = int8;
    table.products = products;
#endif
}

}  // namespace gs::amx
