// A lane: a thread that runs one call of experts.moe at a time while the caller continues.
#include <pthread.h>
#include <sched.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "../error.h"
#include "../pool.h"
#include "abi.h"

namespace {

using Clock = std::chrono::steady_clock;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

enum State : uint32_t { idle, announced, begun, done, closing };

}  // namespace

struct gs_lane {
    std::atomic<uint32_t> state{idle};
    const gs_moe_args* args = nullptr;
    uint32_t* word = nullptr;
    uint32_t value = 0;
    std::atomic<int> team{1};
    gs_status status = GS_OK;
    char message[1024] = "";
    double begin = 0, end = 0;
    std::thread thread{[this] { serve(); }};  // last, so that the other members are initialised before it starts

    void serve() {
        pthread_setname_np(pthread_self(), "goldsmith lane");
        for (;;) {
            const uint32_t seen = state.load();
            if (seen == closing) return;
            if (seen == announced) {
                poll();
            } else if (seen == begun) {
                compute();
            } else {
                state.wait(seen);
            }
        }
    }

    // Poll for a call as long as the pool's workers do.
    void poll() {
        gs::announce(team.load());
        const auto until = Clock::now() + std::chrono::microseconds(50);
        while (state.load() == announced)
            if (uint32_t waited = announced; Clock::now() >= until) state.compare_exchange_strong(waited, idle);
    }

    void compute() {
        begin = now();
        status = gs_moe_forward(args);
        if (status != GS_OK) std::snprintf(message, sizeof message, "%s", gs_message());
        end = now();
        if (word != nullptr) std::atomic_ref(*word).store(value, std::memory_order_release);
        set(done);
    }

    bool begun_already() const {
        const uint32_t seen = state.load();
        return seen == begun || seen == done;
    }

    void set(State next) {
        state.store(next);
        state.notify_all();
    }

    // Wait for the call, first by polling: waking up takes as long as a small call.
    void finish() {
        const auto until = Clock::now() + std::chrono::milliseconds(2);
        while (state.load() == begun && Clock::now() < until) sched_yield();
        while (state.load() == begun) state.wait(begun);
        state.store(idle);
    }
};

gs_status gs_lane_new(gs_lane** lane) {
    return gs::guarded([&] { *lane = new gs_lane; });
}

gs_status gs_lane_ready(gs_lane* lane, int32_t threads) {
    return gs::guarded([&] {
        lane->team.store(threads);
        uint32_t seen = idle;
        if (lane->state.compare_exchange_strong(seen, announced)) lane->state.notify_all();
    });
}

gs_status gs_lane_begin(gs_lane* lane, const gs_moe_args* args, uint32_t* word, uint32_t value) {
    return gs::guarded([&] {
        if (lane->begun_already()) gs::fail(GS_INVALID, "a lane runs one call at a time: end the previous one first");
        lane->args = args, lane->word = word, lane->value = value;
        lane->set(begun);
    });
}

gs_status gs_lane_end(gs_lane* lane, double* times) {
    return gs::guarded([&] {
        if (!lane->begun_already()) gs::fail(GS_INVALID, "no call was begun on this lane");
        lane->finish();
        times[0] = lane->begin;
        times[1] = lane->end;
        if (lane->status != GS_OK) gs::fail(lane->status, "%s", lane->message);
    });
}

void gs_lane_free(gs_lane* lane) {
    if (lane->begun_already()) lane->finish();
    lane->set(closing);
    lane->thread.join();
    delete lane;
}
