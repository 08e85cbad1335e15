// The thread pool: one per process, with workers parked between calls; a forked child gets a new one.
#pragma once

#include <atomic>
#include <cstdint>

namespace gs {

// An item of work; `worker` is in 0..threads()-1, and no two items run with the same worker at the same time.
using Item = void (*)(void* context, int64_t item, int worker);

// Sets the number of threads for this thread's calls during its lifetime; entry points create one from their arguments.
class Threads {
public:
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

private:
    int before_;
};

// Sets the processors of workers that start later (see gs_workers_on). Workers are bound to a node instead of one
// processor, because two processes could otherwise share a processor while another is idle.
void workers_on(const int32_t* processors, const int32_t* nodes, int count);

// The number of threads of a call; inside an item it is 1, so nested regions run in the item's thread.
int threads();

// Runs items 0..items-1 on threads() threads, including this one, and returns when all are done. Items begin in order:
// when one begins, all earlier ones have a thread. They end in any order. The first exception of an item is rethrown
// here; items that had not begun by then are skipped.
void parallel_for(int64_t items, Item run, void* context);

// A one-time event; waiters poll for a while, then sleep.
class Event {
public:
    void happen();
    void wait();

private:
    std::atomic<uint32_t> happened_{0};
};

// Announces a region of `team` threads: parked workers wake up and poll for a while.
void announce(int team);

template <class Function> void parallel_for(int64_t items, const Function& function) {
    parallel_for(
        items, [](void* context, int64_t item, int worker) { (*static_cast<const Function*>(context))(item, worker); },
        const_cast<Function*>(&function));
}

}  // namespace gs
