// Scratch memory of one call: all regions are reserved first, then one allocation holds them without overlap.
//
//     Arena arena;
//     const auto sums = arena.shared<float>(tokens * 16);
//     const auto tile = arena.each<float>(1024);          // one for every worker
//     arena.allocate();
//     parallel_for(items, [&](int64_t item, int worker) { ... sums.data() ... tile.data(worker) ... });
//     arena.check();
//
// The memory is not zeroed. A debug build fills it with bytes that are NaN as floats and puts guard words after every
// region, which check() reads; AddressSanitizer stops accesses to them.
//
// Templates here are always inlined: kernels of several levels include them, and no level may call a copy that was
// compiled for another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gs {

// Requests 2 MiB pages for large memory that has not been written yet: page faults for every 4 KiB, in all workers at
// once, take longer than the computation.
void prefer_huge_pages(void* data, size_t bytes);

class Arena;

template <class T> class Region {
public:
    [[gnu::always_inline]] T* data(int worker = 0) const {
        return reinterpret_cast<T*>(*base_ + offset_ + size_t(worker) * stride_);
    }

private:
    friend Arena;
    Region(char* const* base, size_t offset, size_t stride) : base_(base), offset_(offset), stride_(stride) {}

    char* const* base_;
    size_t offset_, stride_;
};

class Arena {
public:
    Arena();
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // `count` elements, 64-byte aligned, shared by all workers.
    template <class T> [[gnu::always_inline]] Region<T> shared(int64_t count) {
        const size_t offset = size_;
        reserve(count, sizeof(T), 1);
        return {&base_, offset, 0};
    }

    // `count` elements for each of the threads() workers.
    template <class T> [[gnu::always_inline]] Region<T> each(int64_t count) {
        const size_t offset = size_;
        return {&base_, offset, reserve(count, sizeof(T), workers())};
    }

    void allocate();
    void check() const;  // fails with GS_INTERNAL after a write beyond a region; debug builds only
    size_t size() const { return size_; }

private:
    struct Gap {
        size_t begin, end;
    };

    static int workers();
    size_t reserve(int64_t count, size_t element, int copies);  // returns the distance of the copies in bytes

    char* base_ = nullptr;
    size_t size_ = 0;
    std::vector<Gap> gaps_;  // gaps between the regions; debug builds only
};

}  // namespace gs
