// The scan in one pass: every tile leaves its total, and one block, the carrier, hands it what lies before it.
#pragma once

#include "mbarrier.cuh"
#include "tiles.cuh"

constexpr int PAUSE = 50;  // nanoseconds between two looks of a tile for what lies before it
// Tiles in a multiprocessor, at least: as many as its shared memory holds, if the compiler leaves them registers. Heads take
// more of those than five could have; then it is the compiler's choice, as where so many threads do not fit.
#if __CUDA_ARCH__ >= 800
template <bool SEGMENTED>
constexpr int TILES_AT_ONCE = SEGMENTED ? 0 : 5;
#else
template <bool SEGMENTED>
constexpr int TILES_AT_ONCE = 0;
#endif

// A sum that one block leaves and another waits for: in words of 64 bits, one half payload and the other flags, so that a
// word is there as a whole or not at all, and no fence is needed. Each has a sector of the L2 cache for itself.
struct alignas(32) Mailbox {
    enum : unsigned { FULL = 1, HEAD = 2 };
    unsigned long long word[2];

    template <typename Sum>
    __device__ void leave(const Sum& sum) {
        static_assert(sizeof(sum.sum) == 8, "one half of it in each word");
        const unsigned long long flags = static_cast<unsigned long long>(FULL | (sum.head ? HEAD : 0)) << 32;
        const unsigned long long bits = *reinterpret_cast<const unsigned long long*>(&sum.sum);
        asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(word), "l"(flags | (bits & 0xffffffff)),
                     "l"(flags | bits >> 32)
                     : "memory");
    }

    // Whether there is one yet.
    template <typename Sum>
    __device__ bool look(Sum& sum) const {
        unsigned long long found[2];
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(found[0]), "=l"(found[1])
                     : "l"(word)
                     : "memory");
        const unsigned long long bits = (found[0] & 0xffffffff) | found[1] << 32;
        sum.sum = *reinterpret_cast<const decltype(sum.sum)*>(&bits);
        sum.head = found[0] >> 32 & HEAD;
        return found[0] >> 32 && found[1] >> 32;
    }

    template <typename Sum>
    __device__ Sum wait() const {
        Sum sum;
        while (!look(sum)) __nanosleep(PAUSE);
        return sum;
    }
};

// A sum that grows for long. Of floats the rounding errors are kept beside it (Knuth's two-sum), so that they do not grow
// with the array; where the sum is no number any more, there are none.
template <typename Sum>
struct LongSum {
    Sum sum;
    double lost;

    __device__ Sum rounded() const {
        if constexpr (decltype(sum.sum)(0.5) == 0) return sum;
        else return {sum.sum + lost, sum.head};
    }

    __device__ void add(const Sum& next) {
        const Sum grown = sum.then(next);
        if constexpr (decltype(sum.sum)(0.5) != 0) {
            const double part = grown.sum - sum.sum;
            lost += (sum.sum - (grown.sum - part)) + (next.sum - part);
            if (next.head || !isfinite(grown.sum)) lost = 0;
        }
        sum = grown;
    }
};

// The carrier. Its warps take 32 tiles each, by turns: they look for totals while they wait for their turn, and hand on at
// once what they know, since a tile waits for those before it alone. Sums are always added in the same order, whichever
// tile is done first. `carried`, what lies before the warp's tiles, and `done`, a barrier of each warp, are shared.
template <typename Sum>
__device__ inline void carry(Mailbox* totals, Mailbox* befores, unsigned tiles, LongSum<Sum>* carried, Mbarrier* done) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < WARPS) init<32>(done + threadIdx.x);
    if (threadIdx.x == 0) *carried = {Sum::none(), 0};
    __syncthreads();
    for (unsigned turn = warp; turn * 32 < tiles; turn += WARPS) {
        const unsigned tile = turn * 32 + lane;
        Sum total = Sum::none();
        bool there = tile >= tiles;
        if (turn > 0)
            while (!test_wait<32>(done + (turn - 1) % WARPS, (turn - 1) / WARPS))
                if (!there) there = totals[tile].look(total);
        LongSum<Sum> sum = *carried;
        __syncwarp();
        const Sum earlier = sum.rounded();
        for (int known = -1; known < 32;) {  // totals from the warp's first on
            if (!there) there = totals[tile].look(total);
            const unsigned missing = __ballot_sync(~0u, !there);
            const int handed = known + 1;
            known = missing ? __ffs(missing) - 1 : 32;
            if (known < handed) continue;
            Sum before;
            const Sum all = total.join_lanes(before);
            if (known == 32) {
                sum.add(all);
                if (lane == 0) *carried = sum;
                arrive(done + warp);
            }
            if (lane >= handed && lane <= known && tile < tiles) befores[tile].leave(earlier.then(before));
        }
    }
}

// scan_single_pass: block 0 is the carrier, the others have a tile each. Blocks start in the order of their numbers on every
// device so far, so that those that a tile waits for are at work; CUB's scan rests on the same. (With numbers drawn from a
// counter, which would need no such order, a tile begins to load a microsecond later, and the whole is 2 % slower.)
// `mail` holds, all zero, a mailbox of each tile for its total, and one for what lies before it.
template <typename T, bool SEGMENTED>
__global__ void __launch_bounds__(THREADS, TILES_AT_ONCE<SEGMENTED>)
scan_single_pass(Scan<T> scan, Mailbox* __restrict__ mail, unsigned tiles) {
    typedef Tile<T, SEGMENTED> Part;
    typedef typename Part::Sum Sum;
    __shared__ typename Part::Staged staged;
    __shared__ Sum shared[WARPS], found;
    __shared__ LongSum<Sum> carried;
    __shared__ Mbarrier done[WARPS];
    if (blockIdx.x == 0) {
        carry<Sum>(mail, mail + tiles, tiles, &carried, done);
        return;
    }
    const unsigned number = blockIdx.x - 1;
    const Part tile(scan, number, staged);
    Sum before;
    const Sum total = tile.total(before, shared);
    if (threadIdx.x == 0) {
        mail[number].leave(total);
        found = mail[tiles + number].template wait<Sum>();
    }
    __syncthreads();
    tile.store(scan, found.then(before));
}
