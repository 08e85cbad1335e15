// The entry points that do not belong to an operator, and the choice of the level.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "arena.h"
#include "cpu.h"
#include "error.h"
#include "goldsmith.h"
#include "pool.h"
#include "table.h"

namespace gs {
namespace {

constexpr int levels = int(std::size(level_names));

// The kernels of each level, including those inherited from lower levels.
struct Tables {
    Table of[levels] = {};
    Tables() {
        void (*const fill[levels])(Table&) = {scalar::fill,      avx2::fill,        avx512::fill,
                                              avx512_vnni::fill, avx512_bf16::fill, amx::fill};
        for (int level = 0; level < levels; ++level) {
            if (level > 0) of[level] = of[level - 1];
            fill[level](of[level]);
        }
    }
};

char last_words[256];
std::atomic_flag spoken;

// Returns to the instruction that failed, which fails again; once the text is written, that ends the process.
void at_bus_error(int) {
    if (spoken.test_and_set()) return;
    [[maybe_unused]] const auto written = write(STDERR_FILENO, last_words, std::strlen(last_words));
    std::signal(SIGBUS, SIG_DFL);
}

std::atomic<int>& chosen() {
    static std::atomic<int> level{int(machine().level)};
    return level;
}

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Bytes per second of all threads together, each reading its share of the memory repeatedly.
double read_rate(double seconds, int64_t bytes) {
    const int64_t share = bytes / threads() / 4096 * 4096;
    if (share < 4096)
        fail(GS_INVALID, "bytes is %lld, expected at least 4096 per thread", static_cast<long long>(bytes));
    const size_t size = size_t(share) * size_t(threads());
    const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(4096, size)), std::free);
    if (!memory) throw std::bad_alloc();
    char* const data = memory.get();
    parallel_for(threads(), [&](int64_t item, int) { std::fill_n(data + item * share, share, char(item + 1)); });
    std::atomic<uint64_t> seen{0};  // keeps the reads
    std::atomic<int64_t> passes{0};
    const auto begin = Clock::now();
    parallel_for(threads(), [&](int64_t item, int) {
        do {
            seen.fetch_xor(table().read(data + item * share, size_t(share)), std::memory_order_relaxed);
            passes.fetch_add(1, std::memory_order_relaxed);
        } while (since(begin) < seconds);
    });
    return double(passes) * double(share) / since(begin);
}

// Operations per second: the sum over threads of the fastest stretch, which nothing interrupted.
double peak_rate(double seconds, int64_t (*peak)(int64_t rounds)) {
    std::vector<double> best(size_t(threads()), 0.0);
    const auto begin = Clock::now();
    parallel_for(threads(), [&](int64_t item, int) {
        do {
            const auto from = Clock::now();
            const auto operations = double(peak(1 << 14));
            best[size_t(item)] = std::max(best[size_t(item)], operations / since(from));
        } while (since(begin) < seconds);
    });
    return std::accumulate(best.begin(), best.end(), 0.0);
}

// Operations per second, averaged over the whole time, of products of `rows` rows with stripes of weights in all
// threads.
double products_rate(const gs_measure_args& args) {
    const auto products = table().products;
    if (products == nullptr) fail(GS_UNSUPPORTED, "level %s has no such instruction", gs_level_name(gs_level()));
    const bool stream = args.what == GS_AMX_STREAM, still = args.what == GS_AMX_L1;
    const int64_t rows = still ? 32 : args.rows, stripes = stream ? args.bytes / threads() / STRIPE_BYTES : 1;
    if (rows < 32 || rows % 32 != 0 || rows > 1 << 20)
        fail(GS_INVALID, "rows is %lld, expected a multiple of 32, at most 2^20", static_cast<long long>(rows));
    if (stripes < (stream ? 2 : 1))
        fail(GS_INVALID, "bytes is %lld, expected at least %lld per thread", static_cast<long long>(args.bytes),
             static_cast<long long>(2 * STRIPE_BYTES));
    const int64_t pairs = rows / 32, share = (pairs + stripes) * STRIPE_BYTES;
    const size_t size = size_t(share) * size_t(threads());
    const std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(4096, size)), std::free);
    if (!memory) throw std::bad_alloc();
    prefer_huge_pages(memory.get(), size);
    parallel_for(threads(), [&](int64_t item, int) { std::fill_n(memory.get() + item * share, share, char{0x3c}); });
    std::atomic<int64_t> operations{0};
    const auto begin = Clock::now();
    parallel_for(threads(), [&](int64_t item, int) {
        const char *own = memory.get() + item * share, *weights = own + pairs * STRIPE_BYTES;
        int64_t done = 0, stripe = 0;
        do {
            const int64_t next = (stripe + 1) % stripes;
            done += products(own, pairs, weights + stripe * STRIPE_BYTES,
                             stream ? weights + next * STRIPE_BYTES : nullptr, still);
            stripe = next;
        } while (since(begin) < args.seconds);
        operations.fetch_add(done, std::memory_order_relaxed);
    });
    return double(operations) / since(begin);
}

}  // namespace

const Table& table() {
    static const Tables tables;
    return tables.of[chosen().load(std::memory_order_relaxed)];
}

}  // namespace gs

const char* gs_level_name(int32_t level) { return level >= 0 && level < gs::levels ? gs::level_names[level] : nullptr; }
int32_t gs_machine_level(void) { return int32_t(gs::machine().level); }
const char* gs_why_not_higher(void) { return gs::machine().why_not_higher; }
int32_t gs_level(void) { return gs::chosen().load(); }

gs_status gs_set_level(int32_t level) {
    return gs::guarded([&] {
        if (level < 0 || level > gs_machine_level())
            gs::fail(GS_INVALID, "level %d, expected 0 to %d on this machine", level, gs_machine_level());
        gs::chosen().store(level);
    });
}

gs_status gs_workers_on(const int32_t* processors, const int32_t* nodes, int32_t count) {
    return gs::guarded([&] { gs::workers_on(processors, nodes, count); });
}

void gs_say_at_bus_error(const char* text) {
    std::strncpy(gs::last_words, text, sizeof gs::last_words - 1);
    struct sigaction action{};
    action.sa_handler = gs::at_bus_error;
    sigaction(SIGBUS, &action, nullptr);
}

gs_status gs_measure(gs_measure_args* args) {
    return gs::guarded([&] {
        gs::check_size(args);
        const gs::Threads team(args->threads);
        if (args->what == GS_READ) {
            args->per_second = gs::read_rate(args->seconds, args->bytes);
            return;
        }
        if (args->what < GS_READ || args->what > GS_AMX_STREAM)
            gs::fail(GS_INVALID, "no probe has the number %d", args->what);
        if (args->what > GS_AMX_BF16) {
            args->per_second = gs::products_rate(*args);
            return;
        }
        const auto peak = gs::table().peak[args->what];
        if (peak == nullptr) gs::fail(GS_UNSUPPORTED, "level %s has no such instruction", gs_level_name(gs_level()));
        args->per_second = gs::peak_rate(args->seconds, peak);
    });
}
