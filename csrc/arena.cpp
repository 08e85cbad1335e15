#include "arena.h"

#include <sys/mman.h>
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "error.h"
#include "pool.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#endif

namespace gs {
namespace {

constexpr size_t line = 64;
constexpr unsigned char unwritten = 0xff, guard = 0xa5;
#ifdef GS_DEBUG
constexpr bool debug = true;
#else
constexpr bool debug = false;
#endif

// The last released block is kept for the next call: the system would zero a new one page by page, which costs as much
// as writing it again. 2,048 tokens of a layer with H 2048, I 1408 and k 6 take 150 MiB forward and 290 MiB backward,
// or 360 with int8 weights, which need second copies of dg and du. Larger blocks are lent to the system with MADV_FREE:
// it takes their pages when it runs short of memory.
constexpr size_t most_held = size_t(384) << 20;
constexpr size_t huge = size_t(2) << 20;  // a huge page, so that distant rows do not each miss the TLB
std::atomic<char*> kept{nullptr};

// The capacity is stored in the line before the block.
size_t& capacity(char* block) { return *reinterpret_cast<size_t*>(block - line); }

void release(char* block) {
    if (block != nullptr) std::free(block - line);
}

char* obtain(size_t size) {
    char* block = kept.exchange(nullptr);
    if (block != nullptr && capacity(block) >= size) return block;
    release(block);
    const size_t page = size >= huge ? huge : line;
    char* memory = static_cast<char*>(std::aligned_alloc(page, (line + size + page - 1) / page * page));
    if (memory == nullptr) throw std::bad_alloc();
    prefer_huge_pages(memory, line + size);
    capacity(memory + line) = size;
    return memory + line;
}

// Lends all but the first pages, which hold the capacity.
void lend(char* block) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(block) / huge * huge + huge,
                    end = (reinterpret_cast<uintptr_t>(block) + capacity(block)) / huge * huge;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_FREE);
}

void put_back(char* block) {
    if (block == nullptr) return;
    if (capacity(block) > most_held) lend(block);
    release(kept.exchange(block));
}

}  // namespace

void prefer_huge_pages(void* data, size_t bytes) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) / huge * huge,
                    end = (reinterpret_cast<uintptr_t>(data) + bytes) / huge * huge;
    // only a hint: a system without huge pages uses small ones
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Arena::Arena() = default;

Arena::~Arena() {
    if (base_ != nullptr) ASAN_UNPOISON_MEMORY_REGION(base_, size_);
    put_back(base_);
}

int Arena::workers() { return threads(); }

size_t Arena::reserve(int64_t count, size_t element, int copies) {
    size_t bytes, all;
    if (count < 0 || __builtin_mul_overflow(size_t(count), element, &bytes) || bytes > SIZE_MAX / 2)
        throw std::bad_alloc();
    const size_t apart = (bytes + line - 1) / line * line + (debug ? line : 0);
    if (__builtin_mul_overflow(apart, size_t(copies), &all) || __builtin_add_overflow(all, size_, &all))
        throw std::bad_alloc();
    if (debug)
        for (size_t at = size_; at < all; at += apart) gaps_.push_back({at + bytes, at + apart});
    size_ = all;
    return apart;
}

void Arena::allocate() {
    base_ = obtain(std::max(size_, line));
    if (!debug) return;
    std::memset(base_, unwritten, size_);
    for (const auto [begin, end] : gaps_) {
        std::memset(base_ + begin, guard, end - begin);
        ASAN_POISON_MEMORY_REGION(base_ + begin, end - begin);
    }
}

void Arena::check() const {
    for (const auto [begin, end] : gaps_) {
        ASAN_UNPOISON_MEMORY_REGION(base_ + begin, end - begin);
        for (size_t at = begin; at < end; ++at)
            if (static_cast<unsigned char>(base_[at]) != guard)
                fail(GS_INTERNAL, "scratch was written %zu bytes beyond the region that ends at byte %zu of %zu",
                     at - begin + 1, begin, size_);
    }
}

}  // namespace gs
