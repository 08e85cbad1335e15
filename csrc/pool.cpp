#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "error.h"

namespace gs {
namespace {

constexpr int most_threads = 1024;
constexpr uint32_t everybody = FUTEX_BITSET_MATCH_ANY;
thread_local int wanted = 1;

// The processors of worker i, at index i % size. Old vectors are never freed, because a worker may be reading them.
std::atomic<const std::vector<cpu_set_t>*> homes{nullptr};

// Binds the worker to its processors. If that fails, for example in a container without them, it runs where it is.
void settle(int id) {
    pthread_setname_np(pthread_self(), "goldsmith");
    const auto* all = homes.load();
    if (all != nullptr && !all->empty()) sched_setaffinity(0, sizeof(cpu_set_t), &(*all)[size_t(id) % all->size()]);
}

// The first 31 workers have a bit each, the others share the last bit.
uint32_t bit_of(int id) { return uint32_t(1) << std::min(id - 1, 31); }
uint32_t bits_below(int team) { return team > 32 ? ~uint32_t(0) : bit_of(team) - 1; }

constexpr int wake = FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG, sleep = FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG;

// Polls for at most 50 us, because the next region often follows immediately. A pool that polls longer takes the cores
// from other threads, first of all from its callers.
bool changes_soon(const std::atomic<uint32_t>& value, uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
    do {
        for (int i = 0; i < 32; ++i) {
            if (value.load() != seen) return true;
            __builtin_ia32_pause();
        }
    } while (std::chrono::steady_clock::now() < until);
    return false;
}

// A counter; threads wait for it to change, first by polling, then parked.
class Signal {
public:
    uint32_t value() const { return value_.load(); }

    // Wakes only parked threads that wait with one of the bits.
    void raise(uint32_t bits = everybody) {
        value_.fetch_add(1);
        if (parked_.load() != 0) syscall(SYS_futex, &value_, wake, INT_MAX, nullptr, nullptr, bits);
    }

    // soon: poll for a while before parking.
    void wait(uint32_t seen, uint32_t bits = everybody, bool soon = true) {
        if (soon && changes_soon(value_, seen)) return;
        parked_.fetch_add(1);
        while (value() == seen) syscall(SYS_futex, &value_, sleep, seen, nullptr, nullptr, bits);
        parked_.fetch_sub(1);
    }

private:
    std::atomic<uint32_t> value_{0}, parked_{0};
};

// A region is open while its items are handed out, and workers enter only then. The caller works, too, and then waits
// only for workers that have entered: a worker that the system has not scheduled yet delays nothing.
class Pool {
public:
    // False if the process is exiting and there are no workers any more.
    bool run(int64_t items, int team, Item item, void* context) {
        std::lock_guard one_at_a_time(regions_);
        if (leaving_.load()) return false;
        grow(team - 1);
        item_ = item, context_ = context, items_ = items, team_ = team;
        failed_.store(false, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        state_.store(open);  // publishes the lines above
        opened_.raise(bits_below(team));
        work(0);
        const uint32_t seen = left_.value();
        if (state_.fetch_and(~open) != open) left_.wait(seen);
        if (failed_.load()) std::rethrow_exception(std::exchange(error_, nullptr));
        return true;
    }

    void announce(int team) {
        std::unique_lock none_under_way(regions_, std::try_to_lock);
        if (!none_under_way || leaving_.load()) return;
        grow(team - 1);
        opened_.raise(bits_below(team));
    }

    void leave() {
        std::lock_guard one_at_a_time(regions_);
        leaving_.store(true);
        opened_.raise();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

private:
    static constexpr uint32_t open = uint32_t(1) << 31;  // a bit of state_; the lower bits count the workers inside

    void grow(int workers) {
        if (int(workers_.size()) >= workers) return;
        sigset_t all, before;  // workers block signals, which are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (int(workers_.size()) < workers)
                workers_.emplace_back(&Pool::serve, this, int(workers_.size()) + 1, opened_.value());
        } catch (const std::system_error&) {
            // the system allows no more threads: the existing ones do all items
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(int id, uint32_t seen) {
        settle(id);
        for (bool wanted_before = true;;) {
            opened_.wait(seen, bit_of(id), wanted_before);
            seen = opened_.value();
            if (leaving_.load()) return;
            uint32_t state = state_.load();
            while (state & open && !state_.compare_exchange_weak(state, state + 1)) {}
            if (!(state & open)) {
                wanted_before = true;
                continue;
            }
            wanted_before = id < team_;
            if (wanted_before) work(id);
            if (state_.fetch_sub(1) == 1) left_.raise();  // closed, and this was the last one inside
        }
    }

    void work(int id) noexcept {
        try {
            Threads alone(1);
            for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) item_(context_, i, id);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
            next_.store(items_, std::memory_order_relaxed);
        }
    }

    std::mutex regions_;
    std::vector<std::thread> workers_;
    std::atomic<bool> leaving_{false}, failed_{false};
    std::exception_ptr error_;
    Item item_ = nullptr;
    void* context_ = nullptr;
    int64_t items_ = 0;
    int team_ = 1;
    Signal opened_, left_;
    alignas(64) std::atomic<uint32_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

std::atomic<Pool*> current{nullptr};

Pool& pool() {
    Pool* existing = current.load();
    if (existing == nullptr) {
        Pool* created = new Pool;
        if (current.compare_exchange_strong(existing, created)) return *created;
        delete created;
    }
    return *existing;
}

struct Process {
    // A forked child has only this thread: the parent's workers do not exist there, and its locks may be held forever.
    // The child abandons the parent's pool and leaks its memory.
    Process() {
        pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    }
    ~Process() {
        if (Pool* existing = current.load()) existing->leave();
    }
} process;

}  // namespace

Threads::Threads(int count) : before_(wanted) {
    if (count < 1 || count > most_threads)
        fail(GS_INVALID, "threads is %d, expected a number from 1 to %d", count, most_threads);
    wanted = count;
}

void workers_on(const int32_t* processors, const int32_t* nodes, int count) {
    auto all = std::make_unique<std::vector<cpu_set_t>>(size_t(std::max(count, 0)));
    for (int i = 0; i < count; ++i) {
        cpu_set_t& home = (*all)[size_t(i)];
        CPU_ZERO(&home);
        for (int k = 0; k < count; ++k) {
            if (processors[k] < 0 || processors[k] >= CPU_SETSIZE)
                fail(GS_INVALID, "processor %d, expected 0 to %d", processors[k], CPU_SETSIZE - 1);
            if (nodes[k] == nodes[i]) CPU_SET(size_t(processors[k]), &home);
        }
    }
    homes.store(all.release());
}

Threads::~Threads() { wanted = before_; }

int threads() { return wanted; }

void Event::happen() {
    happened_.store(1);
    syscall(SYS_futex, &happened_, wake, INT_MAX, nullptr, nullptr, everybody);
}

void Event::wait() {
    if (happened_.load() != 0 || changes_soon(happened_, 0)) return;
    while (happened_.load() == 0) syscall(SYS_futex, &happened_, sleep, 0, nullptr, nullptr, everybody);
}

void announce(int team) {
    try {
        if (team > 1) pool().announce(std::min(team, most_threads));
    } catch (const std::exception&) {
        // the region itself will report the error
    }
}

void parallel_for(int64_t items, Item run, void* context) {
    const int team = int(std::min<int64_t>(wanted, items));
    if (team > 1 && pool().run(items, team, run, context)) return;
    Threads alone(1);
    for (int64_t i = 0; i < items; ++i) run(context, i, 0);
}

}  // namespace gs
