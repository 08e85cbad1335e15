// AMX's tile instructions; a tile has 16 rows of 64 bytes. GS_TILES_IN_SOFTWARE emulates them in plain C++, for
// machines without AMX.
#pragma once

#include "../arithmetic/simd.h"

namespace gs::GS_LEVEL {

#if defined(__AMX_BF16__)

#if defined(GS_TILES_IN_SOFTWARE)

inline thread_local uint32_t tile_data[8][16][16];

struct Tiles {
    Tiles() {}
    ~Tiles() {}
};

template <int T> void tile_load(const void* from, int64_t bytes) {
    for (int i = 0; i < 16; ++i) std::memcpy(tile_data[T][i], static_cast<const char*>(from) + i * bytes, 64);
}
template <int T> void tile_store(void* to, int64_t bytes) {
    for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(to) + i * bytes, tile_data[T][i], 64);
}
template <int T> void tile_zero() { std::memset(tile_data[T], 0, sizeof tile_data[T]); }
template <int SUM, int A, int B> void tile_dot() {
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 16; ++j) {
                const uint32_t a = tile_data[A][i][k], b = tile_data[B][k][j];
                float sum;
                std::memcpy(&sum, &tile_data[SUM][i][j], 4);
                sum += bfloat16(static_cast<uint16_t>(a)) * bfloat16(static_cast<uint16_t>(b));
                sum += bfloat16(static_cast<uint16_t>(a >> 16)) * bfloat16(static_cast<uint16_t>(b >> 16));
                std::memcpy(&tile_data[SUM][i][j], &sum, 4);
            }
}

#define TILE_LOAD(tile, from, bytes) tile_load<tile>(from, bytes)
#define TILE_STORE(tile, to, bytes) tile_store<tile>(to, bytes)
#define TILE_ZERO(tile) tile_zero<tile>()
#define TILE_DOT(sum, a, b) tile_dot<sum, a, b>()

#else

// Configures a worker's tiles during an item. If they stayed configured, every thread switch would save 8 KiB.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t shape[64] = {1};
        for (int i = 0; i < 8; ++i) shape[16 + 2 * i] = 64, shape[48 + i] = 16;
        // gcc 12 assumes that the instruction reads only the first eight bytes; this tells it about the others
        __asm__ volatile("" ::"r"(shape) : "memory");
        _tile_loadconfig(shape);
    }
    ~Tiles() { _tile_release(); }
};

// gcc's intrinsics paste the tile number into the instruction, so it must be a literal
#define TILE_LOAD(tile, from, bytes) _tile_loadd(tile, from, bytes)
#define TILE_STORE(tile, to, bytes) _tile_stored(tile, to, bytes)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT(sum, a, b) _tile_dpbf16ps(sum, a, b)

#endif

#else

struct Tiles {};

#endif

}  // namespace gs::GS_LEVEL
