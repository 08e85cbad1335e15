// A phase over parts, each of which is first begun and then done in pieces. The worker that begins a part goes on with
// its pieces, so that the rows that it has just laid down are read from its own L2; who finds no part left to begin
// helps with the pieces of those under way. Which worker does what changes no sum: a piece computes its outputs whole.
#pragma once

#include <atomic>
#include <new>

#include "../../arena.h"
#include "../../pool.h"
#include "instructions.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct Progress {
    std::atomic<int64_t> next{0};  // piece
    Event begun;
};

// Parts [first, last) in `pieces` each; progress: room for as many parts.
template <class Begin, class Piece>
void each_part(int64_t first, int64_t last, int64_t pieces, Progress* progress, const Begin& begin,
               const Piece& piece) {
    const int64_t count = last - first;
    for (int64_t i = 0; i < count; ++i) new (progress + i) Progress;
    // items are begun in order: when the second half is reached, every part has been taken by somebody
    parallel_for(2 * count, [&](int64_t item, int worker) {
        [[maybe_unused]] const Tiles tiles;
        const bool helps = item >= count;
        const int64_t i = helps ? 2 * count - 1 - item : item;  // the last ones taken have most left to do
        Progress& part = progress[i];
        if (helps) {
            part.begun.wait();
        } else {
            const struct Begun {  // also when it throws: nobody is to wait for ever
                Event& event;
                ~Begun() { event.happen(); }
            } at_the_end{part.begun};
            begin(first + i, worker);
        }
        for (int64_t k; (k = part.next.fetch_add(1, std::memory_order_relaxed)) < pieces;) piece(first + i, k, worker);
    });
}

}  // namespace gs::GS_LEVEL

#endif
