// Entry points for tests/native that exercise the pool, the arena and errors; debug builds only.
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "arena.h"
#include "cpu.h"
#include "error.h"
#include "pool.h"

extern "C" {

// Adds 1 to counts[i] for each item i, and 100 more from a nested region; item `bad` fails (-1: none). Fails if two
// items run with the same worker at the same time.
GS_API gs_status gs_selftest_pool(int32_t threads, int64_t items, int64_t bad, int64_t* counts) {
    return gs::guarded([&] {
        const gs::Threads team(threads);
        gs::Arena arena;
        const auto busy = arena.each<int>(1);
        arena.allocate();
        for (int worker = 0; worker < gs::threads(); ++worker) *busy.data(worker) = 0;
        gs::parallel_for(items, [&](int64_t item, int worker) {
            if (worker < 0 || worker >= threads) gs::fail(GS_INTERNAL, "worker %d of %d", worker, threads);
            if ((*busy.data(worker))++ != 0) gs::fail(GS_INTERNAL, "worker %d runs two items at a time", worker);
            if (item == bad) gs::fail(GS_INVALID, "item %lld is bad", static_cast<long long>(item));
            counts[item] += 1;
            gs::parallel_for(10, [&](int64_t, int) { counts[item] += 10; });
            --*busy.data(worker);
        });
        arena.check();
    });
}

// Writes `count` bytes at offset `from` of the second of three regions of 100 bytes.
GS_API gs_status gs_selftest_arena(int64_t from, int64_t count) {
    return gs::guarded([&] {
        gs::Arena arena;
        const auto first = arena.shared<char>(100), second = arena.shared<char>(100), third = arena.shared<char>(100);
        arena.allocate();
        for (const auto& region : {first, second, third})
            for (int i = 0; i < 100; ++i)
                if (static_cast<unsigned char>(region.data()[i]) != 0xff)
                    gs::fail(GS_INTERNAL, "scratch holds old values");
        std::memset(second.data() + from, 1, size_t(count));
        arena.check();
    });
}

// Runs as many items as threads; each waits until all have begun, and ends a little later. With `race` they then write
// to one address, which kernels must not do.
GS_API gs_status gs_selftest_meet(int32_t threads, int32_t race) {
    return gs::guarded([&] {
        const gs::Threads team(threads);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        std::atomic<int> begun{0}, ended{0};
        volatile int64_t place = 0;
        gs::parallel_for(threads, [&](int64_t item, int) {
            ++begun;
            while (begun < threads)
                if (std::chrono::steady_clock::now() > until)
                    gs::fail(GS_INTERNAL, "%d of %d threads", +begun, threads);
            if (race) place = item;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            ++ended;
        });
        if (ended != threads) gs::fail(GS_INTERNAL, "returned when %d of %d items had ended", +ended, threads);
    });
}

// Throws exception number `kind` inside an item.
GS_API gs_status gs_selftest_throw(int32_t threads, int32_t kind) {
    return gs::guarded([&] {
        const gs::Threads team(threads);
        gs::parallel_for(8, [&](int64_t, int) {
            if (kind == 0) throw std::bad_alloc();
            if (kind == 1) throw std::runtime_error("the words of a standard exception");
            if (kind == 2) gs::fail(GS_UNSUPPORTED, "this machine has no %s", "such thing");
            throw kind;
        });
    });
}

// The level of a processor with all of AVX-512, and the reason why it is not higher.
GS_API int32_t gs_selftest_level(int32_t intel, uint32_t model, int32_t amx, int32_t tiles, const char** why) {
    gs::Processor p{};
    p.intel = intel, p.tiles = tiles, p.model = model;
    p.basic = p.more[0] = p.more[1] = p.extra = 0xffffffff, p.saved = 0x600e6;
    p.more[2] = amx ? 0xffffffff : 0;
    const gs::Machine found = gs::level_of(p);
    *why = found.why_not_higher;
    return int32_t(found.level);
}

}  // extern "C"
