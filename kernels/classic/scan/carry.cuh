// The single-pass scan: every tile publishes its total, and one block, the carrier, sends it the sum of all tiles before it.
#pragma once

#include "mbarrier.cuh"
#include "tiles.cuh"

constexpr int PAUSE = 50;  // nanoseconds between two polls for a prefix
// Minimum tiles per multiprocessor: as many as shared memory holds. Segmented tiles need more registers than that would
// leave them; then, and on devices with fewer threads per multiprocessor, it is the compiler's choice (0).
#if __CUDA_ARCH__ >= 800
template <bool SEGMENTED>
constexpr int TILES_AT_ONCE = SEGMENTED ? 0 : 5;
#else
template <bool SEGMENTED>
constexpr int TILES_AT_ONCE = 0;
#endif

// A sum sent from one block to another: 64-bit words, half payload and half flags, so that a word arrives as a whole and no
// fence is needed. Each mailbox has its own sector of the L2 cache.
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

    // Whether the sum has arrived.
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

// A compensated running sum: for floats the rounding errors are kept separately (Knuth's two-sum), so that they do not grow
// with the array; they are dropped when the sum is no longer finite.
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

// The carrier. Its warps take 32 tiles each, in turn: they poll for totals while they wait for their turn, and send every
// prefix as soon as it is known. Sums are always added in the same order, independent of the order in which tiles finish.
// `carried`, the prefix of the warp's tiles, and `done`, one barrier per warp, are in shared memory.
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

// scan_single_pass: block 0 is the carrier, the others have one tile each. Blocks start in the order of their numbers on
// all devices so far, so the tiles that a tile waits for are running; CUB's scan relies on the same. (With numbers from a
// counter, which needs no such order, a tile starts loading a microsecond later, and the scan is 2 % slower.)
// `mail` holds two cleared mailboxes for each tile, one for its total and one for its prefix.
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
