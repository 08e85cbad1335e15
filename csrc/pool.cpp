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

// By i % size: the processors that worker i may have. What was there before is never freed: a worker may be reading it.
std::atomic<const std::vector<cpu_set_t>*> homes{nullptr};

// Not to be had: a container may take processors away; the worker then runs where it is.
void settle(int id) {
    pthread_setname_np(pthread_self(), "goldsmith");
    const auto* all = homes.load();
    if (all != nullptr && !all->empty()) sched_setaffinity(0, sizeof(cpu_set_t), &(*all)[size_t(id) % all->size()]);
}

// The first workers have a bit each, the others share the last one.
uint32_t bit_of(int id) { return uint32_t(1) << std::min(id - 1, 31); }
uint32_t bits_below(int team) { return team > 32 ? ~uint32_t(0) : bit_of(team) - 1; }

constexpr int wake = FUTEX_WAKE_BITSET | FUTEX_PRIVATE_FLAG, sleep = FUTEX_WAIT_BITSET | FUTEX_PRIVATE_FLAG;

// At most 50 us awake, because the next region often comes at once. A pool that spins for longer takes the cores from
// whoever else wants them, its own callers first.
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

// A number that threads wait for a change of: they look out for it for a while, then they are parked.
class Signal {
public:
    uint32_t value() const { return value_.load(); }

    // Those that are parked stay so unless they wait with one of the bits.
    void raise(uint32_t bits = everybody) {
        value_.fetch_add(1);
        if (parked_.load() != 0) syscall(SYS_futex, &value_, wake, INT_MAX, nullptr, nullptr, bits);
    }

    // `soon`: look out for it for a while before parking.
    void wait(uint32_t seen, uint32_t bits = everybody, bool soon = true) {
        if (soon && changes_soon(value_, seen)) return;
        parked_.fetch_add(1);
        while (value() == seen) syscall(SYS_futex, &value_, sleep, seen, nullptr, nullptr, bits);
        parked_.fetch_sub(1);
    }

private:
    std::atomic<uint32_t> value_{0}, parked_{0};
};

// A region is open while its items are handed out. Workers enter only then, and the caller, who works as well, waits
// for those alone that have entered: one that the system has not scheduled yet holds nobody up.
class Pool {
public:
    // False when the process is ending and there are no workers any more.
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

    void rouse(int team) {
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
    static constexpr uint32_t open = uint32_t(1) << 31;  // in state_; below it, how many workers are inside

    void grow(int workers) {
        if (int(workers_.size()) >= workers) return;
        sigset_t all, before;  // signals are for the threads that were there before us
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (int(workers_.size()) < workers)
                workers_.emplace_back(&Pool::serve, this, int(workers_.size()) + 1, opened_.value());
        } catch (const std::system_error&) {
            // the system gives no more of them: those that there are do all items
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
    Pool* there = current.load();
    if (there == nullptr) {
        Pool* made = new Pool;
        if (current.compare_exchange_strong(there, made)) return *made;
        delete made;
    }
    return *there;
}

struct Process {
    // A forked child has this thread alone: the parent's workers are not there, and its locks may be held by nobody.
    // Its pool is left behind, in memory that is not given back.
    Process() {
        pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    }
    ~Process() {
        if (Pool* there = current.load()) there->leave();
    }
} process;

}  // namespace

Threads::Threads(int count) : before_(wanted) {
    if (count < 1 || count > most_threads)
        fail(GS_INVALID, "threads is %d, wanted a number from 1 to %d", count, most_threads);
    wanted = count;
}

void workers_on(const int32_t* processors, const int32_t* nodes, int count) {
    auto all = std::make_unique<std::vector<cpu_set_t>>(size_t(std::max(count, 0)));
    for (int i = 0; i < count; ++i) {
        cpu_set_t& home = (*all)[size_t(i)];
        CPU_ZERO(&home);
        for (int k = 0; k < count; ++k) {
            if (processors[k] < 0 || processors[k] >= CPU_SETSIZE)
                fail(GS_INVALID, "processor %d, wanted 0 to %d", processors[k], CPU_SETSIZE - 1);
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

void rouse(int team) {
    try {
        if (team > 1) pool().rouse(std::min(team, most_threads));
    } catch (const std::exception&) {
        // the region itself will say what is wrong
    }
}

void parallel_for(int64_t items, Item run, void* context) {
    const int team = int(std::min<int64_t>(wanted, items));
    if (team > 1 && pool().run(items, team, run, context)) return;
    Threads alone(1);
    for (int64_t i = 0; i < items; ++i) run(context, i, 0);
}

}  // namespace gs
