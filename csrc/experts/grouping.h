// The routes of a call, grouped by expert; computed once, and the same for every level.
#pragma once

#include <memory>

#include "../goldsmith.h"

namespace gs {

// Routes order[begin .. begin + count) go to one expert.
struct Segment {
    int64_t expert, begin, count;
};

// Tokens [begin, end) and their routes as segments [first, last) of `parts`.
struct Chunk {
    int64_t begin, end, first, last;
};

class Grouping {
public:
    // Throws for an id outside -1..E-1. `rows`: the most routes of a segment.
    Grouping(const gs_moe_args& args, int64_t rows);
    ~Grouping();

    const int64_t* order;     // routes token * slots + slot, sorted by expert, then by route; without skipped ones
    const int64_t* expert;    // begin of each expert's routes in `order`, and the end of the last one's
    const Segment* segments;  // sorted by expert
    const Chunk* chunks;
    const Segment* parts;                                      // sorted by chunk, then by expert
    int64_t routes, segment_count, chunk_count, chunk_routes;  // chunk_routes: the most slots of a chunk

private:
    struct Lists;
    std::unique_ptr<Lists> lists_;
};

inline int64_t id_at(const gs_moe_args& args, int64_t route) {
    const gs_tensor& ids = args.ids;
    const int64_t at = route / args.slots * ids.strides[0] + route % args.slots * ids.strides[1];
    return ids.dtype == GS_I32 ? static_cast<const int32_t*>(ids.data)[at] : static_cast<const int64_t*>(ids.data)[at];
}

}  // namespace gs
