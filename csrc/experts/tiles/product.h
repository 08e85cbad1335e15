// Products of operands stored as whole tiles of 1 KiB, consecutive along the sum: the 32 x 32 sums stay in tiles from
// the first step to the last, and only tiles are loaded in between.
#pragma once

#include "instructions.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

constexpr int TILE_BYTES = 1024, STEP_OF_TILE = 32;  // inputs of a tile of bfloat16

// A part of a sum. Tiles of rows are `step` bytes apart. The further cuts of a tile of weights (the remainders of the
// truncation to bfloat16) follow it, two tiles further each.
struct Link {
    const char *upper, *lower;      // on the left: 16 rows each
    const char *first, *second;     // on the right: 16 columns each
    int64_t left_step, right_step;  // bytes from one 32 of the sum to the next
    int64_t steps;
};

// Work for later steps: prefetch `lines` lines of 64 bytes per step from `at` on, and decode(self), which makes some
// tiles of a later step; its instructions overlap with the products of this step.
struct Ahead {
    const char* at;
    int64_t lines;
    void (*decode)(void*) = nullptr;
    void* self = nullptr;
};

enum Weights { ON_THE_LEFT, ON_THE_RIGHT };

inline void fetch_ahead(Ahead& ahead) {
    for (int64_t i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.at + 64 * i, 0, 2);
    ahead.at += 64 * ahead.lines;
    if (ahead.decode) {
        ahead.decode(ahead.self);
        __asm__ volatile("" ::: "memory");
    }
}

// Each operand is zeroed immediately after use. While the other hyperthread of a core uses tiles, there are few
// registers for renaming, and a zeroed tile takes none: products and loads then take half the time. Otherwise it costs
// nothing.
template <Weights SIDE, bool TALL, bool WIDE> void add_link(const Link& link, int cuts, Ahead& ahead) {
    const char *upper = link.upper, *lower = link.lower, *first = link.first, *second = link.second;
    for (int64_t k = 0; k < link.steps; ++k) {
        if (SIDE == ON_THE_RIGHT) {
            TILE_LOAD(4, upper, 64);
            if (TALL) TILE_LOAD(5, lower, 64);
        } else {
            TILE_LOAD(6, first, 64);
            if (WIDE) TILE_LOAD(7, second, 64);
        }
        for (int cut = 0; cut < cuts; ++cut) {
            const int64_t at = cut * 2 * TILE_BYTES;
            if (SIDE == ON_THE_RIGHT) {
                TILE_LOAD(6, first + at, 64);
                TILE_DOT(0, 4, 6);
                if (TALL) TILE_DOT(2, 5, 6);
                TILE_ZERO(6);
                if (WIDE) {
                    TILE_LOAD(7, second + at, 64);
                    TILE_DOT(1, 4, 7);
                    if (TALL) TILE_DOT(3, 5, 7);
                    TILE_ZERO(7);
                }
            } else {
                TILE_LOAD(4, upper + at, 64);
                TILE_DOT(0, 4, 6);
                if (WIDE) TILE_DOT(1, 4, 7);
                TILE_ZERO(4);
                if (TALL) {
                    TILE_LOAD(5, lower + at, 64);
                    TILE_DOT(2, 5, 6);
                    if (WIDE) TILE_DOT(3, 5, 7);
                    TILE_ZERO(5);
                }
            }
        }
        if (SIDE == ON_THE_RIGHT) {
            TILE_ZERO(4);
            if (TALL) TILE_ZERO(5);
        } else {
            TILE_ZERO(6);
            if (WIDE) TILE_ZERO(7);
        }
        fetch_ahead(ahead);
        upper += link.left_step, lower += link.left_step, first += link.right_step, second += link.right_step;
    }
}

// The same with one cut and all four sums; at most three operands are live at a time.
inline void add_whole_link(const Link& link, Ahead& ahead) {
    const char *upper = link.upper, *lower = link.lower, *first = link.first, *second = link.second;
    for (int64_t k = 0; k < link.steps; ++k) {
        TILE_LOAD(4, upper, 64);
        TILE_LOAD(6, first, 64);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, second, 64);
        TILE_DOT(1, 4, 7);
        TILE_ZERO(4);
        TILE_LOAD(5, lower, 64);
        TILE_DOT(3, 5, 7);
        TILE_ZERO(7);
        TILE_DOT(2, 5, 6);
        TILE_ZERO(5);
        TILE_ZERO(6);
        fetch_ahead(ahead);
        upper += link.left_step, lower += link.left_step, first += link.right_step, second += link.right_step;
    }
}

constexpr int64_t ROUND = 4;  // buffers in L1 for weight tiles that are used once

// The weight tiles have ROUND buffers, which `ahead.decode` fills in turn, two steps before their products.
template <Weights SIDE, bool TALL, bool WIDE> void add_rounds(Link link, int cuts, Ahead& ahead) {
    for (int64_t left = link.steps; left > 0; left -= link.steps) {
        link.steps = left < ROUND ? left : ROUND;
        add_link<SIDE, TALL, WIDE>(link, cuts, ahead);
        if (SIDE == ON_THE_RIGHT)
            link.upper += link.steps * link.left_step, link.lower += link.steps * link.left_step;
        else
            link.first += link.steps * link.right_step, link.second += link.steps * link.right_step;
    }
}

template <Weights SIDE, bool TALL, bool WIDE, bool ROUNDS>
void dot_links(const Link* links, int64_t count, int cuts, Ahead ahead, float* sums) {
    // gcc's tile intrinsics do not declare that they read and write memory
    __asm__ volatile("" ::: "memory");
    TILE_ZERO(0);
    if (WIDE) TILE_ZERO(1);
    if (TALL) TILE_ZERO(2);
    if (TALL && WIDE) TILE_ZERO(3);
    for (int64_t i = 0; i < count; ++i) {
        if (ROUNDS)
            add_rounds<SIDE, TALL, WIDE>(links[i], cuts, ahead);
        else if (cuts == 1 && TALL && WIDE)
            add_whole_link(links[i], ahead);
        else if (cuts == 1)
            add_link<SIDE, TALL, WIDE>(links[i], 1, ahead);
        else
            add_link<SIDE, TALL, WIDE>(links[i], cuts, ahead);
    }
    TILE_STORE(0, sums, 128);
    if (WIDE) TILE_STORE(1, sums + 16, 128);
    if (TALL) TILE_STORE(2, sums + 16 * 32, 128);
    if (TALL && WIDE) TILE_STORE(3, sums + 16 * 32 + 16, 128);
    __asm__ volatile("" ::: "memory");
}

// sums[32][32] = the sum of the links; tall: all 32 rows, else 16; wide: all 32 columns, else 16.
template <Weights SIDE, bool ROUNDS = false>
void dot(const Link* links, int64_t count, int cuts, bool tall, bool wide, const Ahead& ahead, float* sums) {
    if (tall && wide)
        dot_links<SIDE, true, true, ROUNDS>(links, count, cuts, ahead, sums);
    else if (tall)
        dot_links<SIDE, true, false, ROUNDS>(links, count, cuts, ahead, sums);
    else if (wide)
        dot_links<SIDE, false, true, ROUNDS>(links, count, cuts, ahead, sums);
    else
        dot_links<SIDE, false, false, ROUNDS>(links, count, cuts, ahead, sums);
}

}  // namespace gs::GS_LEVEL

#endif
