// The scan in one pass: each tile takes what lies before it from its predecessors.
#pragma once

#include "tiles.cuh"

constexpr int GROUP = 128;  // tiles; a block looks at all of its group at once
constexpr int PAUSE = 100;  // nanoseconds between two looks: a crowd that asks all the time slows the copies down
constexpr int MAIL_HEADER = 16;  // bytes, for the ticket

// A sum that one tile leaves and others wait for: in words of 64 bits, one half payload and the other flags, so that a
// word is there as a whole or not at all, and no fence is needed.
template <typename Sum>
struct Mailbox {
    static constexpr int WORDS = sizeof(Sum::sum) / 4;
    enum : unsigned { FULL = 1, HEAD = 2 };
    unsigned long long word[WORDS];

    union Bits {
        decltype(Sum::sum) value;
        unsigned half[WORDS];
    };

    __device__ void leave(const Sum& sum) {
        Bits bits;
        bits.value = sum.sum;
        const unsigned long long flags = static_cast<unsigned long long>(FULL | (sum.head ? HEAD : 0)) << 32;
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word + w), "l"(flags | bits.half[w]) : "memory");
    }

    __device__ Sum wait() const {
        unsigned long long found[WORDS];
        for (;;) {
            bool full = true;
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found[w]) : "l"(word + w) : "memory");
#pragma unroll
            for (int w = 0; w < WORDS; ++w) full = full && found[w] >> 32;
            if (full) break;
            __nanosleep(PAUSE);
        }
        Bits bits;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) bits.half[w] = static_cast<unsigned>(found[w]);
        return {bits.value, (found[0] >> 32 & HEAD) != 0};
    }
};

// What lies before tile `number`, whose own total is `total`. The look-back has two fixed parts, waited for at once:
// the tiles before it in its group, one a thread, and everything before the group, which the last tile of the group
// before leaves. So it never walks far, and it always adds in the same order, whichever tile is done first.
template <typename Sum>
__device__ inline Sum look_back(Mailbox<Sum>* tiles, Mailbox<Sum>* groups, unsigned number, const Sum& total,
    Sum* shared) {
    const unsigned group = number / GROUP, place = number % GROUP, thread = threadIdx.x;
    if (thread == 0) tiles[number].leave(total);
    static_assert(GROUP < THREADS, "the last thread has no tile of its own to wait for");
    Sum sum = Sum::none();
    if (thread < place) sum = tiles[group * GROUP + thread].wait();
    if (thread == THREADS - 1 && group) shared[WARPS] = groups[group - 1].wait();
    __syncwarp();
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum = sum.then(sum.lanes_above(distance));
    if (thread % 32 == 0) shared[thread / 32] = sum;
    __syncthreads();
    sum = group ? shared[WARPS] : Sum::none();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum = sum.then(shared[w]);
    if (thread == 0 && place == GROUP - 1) groups[group].leave(sum.then(total));
    return sum;
}

// scan_single_pass: blocks take tiles in the order in which they start, so that those that a tile waits for are at
// work. `mail` holds, all zero: a ticket (MAIL_HEADER bytes), the mailboxes of `tiles` tiles, and those of their
// groups.
template <typename T, bool SEGMENTED>
__global__ void __launch_bounds__(THREADS)
scan_single_pass(Scan<T> scan, unsigned char* __restrict__ mail, unsigned tiles) {
    typedef Tile<T, SEGMENTED> Part;
    typedef typename Part::Sum Sum;
    __shared__ typename Part::Staged staged;
    __shared__ Sum totals[WARPS], looked[WARPS + 1];
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(mail), 1u);
    __syncthreads();
    const unsigned number = ticket;
    const Part tile(scan, number, staged);
    Sum before[Part::ROWS], warp;
    const Sum total = join_warps(tile.scan_warp(before), warp, totals);
    Mailbox<Sum>* boxes = reinterpret_cast<Mailbox<Sum>*>(mail + MAIL_HEADER);
    const Sum sum = look_back(boxes, boxes + tiles, number, total, looked);
    tile.store(scan, sum.then(warp), before);
}
