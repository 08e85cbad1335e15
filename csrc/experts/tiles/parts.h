// A phase over parts: each part is begun by one worker and then computed in pieces. The worker that began a part
// continues with its pieces, so that it reads the prepared rows from its own L2. Workers without a part to begin help
// with the pieces of others. The schedule does not change any sum, because a piece computes its outputs completely.
#pragma once

#include <atomic>
#include <new>

#include "../../arena.h"
#include "../../pool.h"
#include "instructions.h"

#if defined(__AMX_BF16__)

namespace gs::GS_LEVEL {

struct Progress {
    std::atomic<int64_t> next{0};  // next piece
    Event begun;
};

// Runs parts [first, last) in `pieces` pieces each; progress: an array with one element per part.
template <class Begin, class Piece>
void each_part(int64_t first, int64_t last, int64_t pieces, Progress* progress, const Begin& begin,
               const Piece& piece) {
    const int64_t count = last - first;
    for (int64_t i = 0; i < count; ++i) new (progress + i) Progress;
    // items begin in order: when the second half begins, every part has been taken
    parallel_for(2 * count, [&](int64_t item, int worker) {
        [[maybe_unused]] const Tiles tiles;
        const bool helps = item >= count;
        const int64_t i = helps ? 2 * count - 1 - item : item;  // the parts begun last have the most work left
        Progress& part = progress[i];
        if (helps) {
            part.begun.wait();
        } else {
            const struct Begun {  // also if it throws, so that nobody waits forever
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
