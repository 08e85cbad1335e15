// The thread pool: one per process, its workers parked between calls, made anew in a forked child.
#pragma once

#include <atomic>
#include <cstdint>

namespace gs {

// An item of work; `worker` is in 0..threads()-1, and no two items run with the same one at a time.
using Item = void (*)(void* context, int64_t item, int worker);

// How many threads the calls of this thread use, for as long as it lives: an entry point makes one from its arguments.
class Threads {
public:
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

private:
    int before_;
};

// Where the workers run that are started from now on; goldsmith.h says it. They stay on a node and not on one
// processor: two processes, or other threads beside them, would sit on the same one while another is idle.
void workers_on(const int32_t* processors, const int32_t* nodes, int count);

// Inside an item it is 1: what is started there runs where it is.
int threads();

// Runs items 0..items-1 on threads() threads, this one among them, and returns when all are done. They are begun in
// order, so that when one begins all before it have a thread; they end in any order. The first exception of an item is
// thrown again here; items that had not begun then are left out.
void parallel_for(int64_t items, Item run, void* context);

// What happens once while others wait for it: they look out for it for a while, then sleep.
class Event {
public:
    void happen();
    void wait();

private:
    std::atomic<uint32_t> happened_{0};
};

// A region of so many threads comes at once: workers that are parked look out for it for a while.
void rouse(int team);

template <class Function> void parallel_for(int64_t items, const Function& function) {
    parallel_for(
        items, [](void* context, int64_t item, int worker) { (*static_cast<const Function*>(context))(item, worker); },
        const_cast<Function*>(&function));
}

}  // namespace gs
