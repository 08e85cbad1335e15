#include "grouping.h"

#include <algorithm>
#include <vector>

#include "../error.h"

namespace gs {

struct Grouping::Lists {
    std::vector<int64_t> order, expert;
    std::vector<Segment> segments, parts;
    std::vector<Chunk> chunks;
};

namespace {

void count(const gs_moe_args& args, std::vector<int64_t>& begin) {
    begin.assign(static_cast<size_t>(args.experts) + 1, 0);
    for (int64_t route = 0; route < args.tokens * args.slots; ++route) {
        const int64_t id = id_at(args, route);
        if (id < -1 || id >= args.experts)
            fail(GS_INVALID,
                 "topk_ids of row %lld, slot %lld is %lld, expected an expert in 0..%lld, or -1 to skip the slot",
                 static_cast<long long>(route / args.slots), static_cast<long long>(route % args.slots),
                 static_cast<long long>(id), static_cast<long long>(args.experts - 1));
        if (id >= 0) ++begin[static_cast<size_t>(id) + 1];
    }
    for (size_t e = 1; e < begin.size(); ++e) begin[e] += begin[e - 1];
}

// Splits order[begin, end) into segments of at most `rows` routes with about equal lengths: 129 become 65 and 64.
void cut(std::vector<Segment>& into, int64_t expert, int64_t begin, int64_t end, int64_t rows) {
    const int64_t pieces = (end - begin + rows - 1) / rows;
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t from = begin + (end - begin) * i / pieces, to = begin + (end - begin) * (i + 1) / pieces;
        into.push_back({expert, from, to - from});
    }
}

}  // namespace

Grouping::Grouping(const gs_moe_args& args, int64_t rows) : lists_(std::make_unique<Lists>()) {
    Lists& lists = *lists_;
    count(args, lists.expert);
    routes = lists.expert.back();
    lists.order.resize(static_cast<size_t>(routes));
    std::vector<int64_t> next(lists.expert.begin(), lists.expert.end() - 1);
    for (int64_t route = 0; route < args.tokens * args.slots; ++route) {
        const int64_t id = id_at(args, route);
        if (id >= 0) lists.order[static_cast<size_t>(next[static_cast<size_t>(id)]++)] = route;
    }
    for (int64_t e = 0; e < args.experts; ++e)
        cut(lists.segments, e, lists.expert[static_cast<size_t>(e)], lists.expert[static_cast<size_t>(e) + 1], rows);

    // A chunk's rows of 32 sums should fit into L2 (4,096 rows are 512 KiB). But each chunk reads the weights once, so
    // it should have at least half a segment's rows per expert.
    const int64_t wanted = std::max<int64_t>(4096, rows / 2 * args.experts);
    const int64_t tokens = std::max<int64_t>(1, wanted / std::max<int64_t>(1, args.slots));
    chunk_routes = 0;
    std::copy(lists.expert.begin(), lists.expert.end() - 1, next.begin());
    for (int64_t begin = 0; begin < args.tokens; begin += tokens) {
        Chunk chunk{begin, std::min(begin + tokens, args.tokens), static_cast<int64_t>(lists.parts.size()), 0};
        for (int64_t e = 0; e < args.experts; ++e) {
            const int64_t from = next[static_cast<size_t>(e)], all = lists.expert[static_cast<size_t>(e) + 1];
            const auto first = lists.order.begin() + from, last = lists.order.begin() + all;
            const int64_t to = std::lower_bound(first, last, chunk.end * args.slots) - lists.order.begin();
            cut(lists.parts, e, from, to, rows);
            next[static_cast<size_t>(e)] = to;
        }
        chunk.last = static_cast<int64_t>(lists.parts.size());
        lists.chunks.push_back(chunk);
        chunk_routes = std::max(chunk_routes, (chunk.end - chunk.begin) * args.slots);
    }
    order = lists.order.data(), expert = lists.expert.data();
    segments = lists.segments.data(), segment_count = static_cast<int64_t>(lists.segments.size());
    parts = lists.parts.data(), chunks = lists.chunks.data(), chunk_count = static_cast<int64_t>(lists.chunks.size());
}

Grouping::~Grouping() = default;

}  // namespace gs
