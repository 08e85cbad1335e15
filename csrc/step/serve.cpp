// The CPU's part of a step that runs on a device: the experts that are not there, layer by layer.
#include <atomic>
#include <chrono>
#include <thread>

#include "../error.h"
#include "../pool.h"
#include "../table.h"

namespace gs {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

constexpr auto ANNOUNCED = std::chrono::microseconds(40);  // the pool's workers poll for 50 us

// Waits until the device asks; the pool's workers stay awake meanwhile.
void wait_for_question(const gs_serve_args& args, int team) {
    std::atomic_ref asked(*args.asked);
    const auto begin = Clock::now();
    auto awake = begin - ANNOUNCED;
    while (asked.load(std::memory_order_acquire) == 0) {
        const auto time = Clock::now();
        if (time - awake >= ANNOUNCED) announce(team), awake = time;
        if (std::chrono::duration<double>(time - begin).count() > args.patience)
            fail(GS_INTERNAL, "the device did not ask for a layer's experts within %g seconds", args.patience);
        if (args.polite) std::this_thread::yield();
    }
    asked.store(0, std::memory_order_relaxed);
}

// ids of the routes that the CPU computes, -1 for the others; returns their number.
int64_t select(const gs_serve_args& args, gs_served_layer& layer) {
    int64_t count = 0;
    for (int64_t route = 0; route < args.routes; ++route) {
        const int64_t id = args.routed[route];
        const bool here = id >= 0 && id < layer.experts->experts && layer.slots[id] < 0;
        args.ids[route] = here ? id : -1;
        count += here;
        if (id >= 0 && id < layer.experts->experts) ++layer.uses[id];
    }
    return count;
}

void serve(const gs_serve_args& args, gs_served_layer& layer) {
    const auto begin = Clock::now();
    const int64_t count = select(args, layer);
    if (count == 0) return;
    gs_moe_args call = *layer.experts;
    call.threads = args.threads[count];
    const gs_status status = gs_moe_forward(&call);
    if (status != GS_OK) fail(status, "%s", gs_message());
    layer.computed += count;
    layer.seconds += seconds_since(begin);
}

}  // namespace
}  // namespace gs

gs_status gs_serve(gs_serve_args* args) {
    std::atomic_ref answered(*args->answered);
    gs_status failed = GS_OK;
    for (int64_t i = 0; i < args->layer_count; ++i) {
        // after a failure the device still gets its answers, because nothing else ends its wait
        gs_status status = gs::guarded([&] {
            gs::wait_for_question(*args, args->threads[args->routes]);
            if (failed == GS_OK) gs::serve(*args, args->layers[i]);
        });
        answered.store(1, std::memory_order_release);
        if (failed == GS_OK) failed = status;
    }
    ++args->served;
    return failed;
}
