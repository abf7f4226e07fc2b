// Radix sort, least significant byte first: each pass moves every key once, to a position given by its digit, the tiles
// before and the keys before it in its tile. Floor: a read and a write per pass, and one read that counts all digits.
#pragma once

#include "block_scan.cuh"
#include "order.cuh"

constexpr int DIGITS = 256;
constexpr int RADIX_THREADS = 256;
constexpr int RADIX_WARPS = RADIX_THREADS / 32;
// Keys per thread: more make longer rows, fewer leave room for more warps; the best of 16, 20, 24 and of 10, 12, 14 on an
// H200.
template <typename Key, typename Value>
constexpr int RADIX_ITEMS = sizeof(Key) == 8 ? 14 : HAS_VALUES<Value> ? 16 : 20;
constexpr int COUNT_BLOCK_KEYS = 1 << 16;

// The state of a tile's digit, in 32 bits: unknown (0), its own count, or the count of it and all tiles before.
constexpr unsigned OWN = 1u << 30, ALL = 2u << 30, COUNT_BITS = OWN - 1;

template <typename Key>
__device__ inline int digit_of(Key key, int shift) {
    return static_cast<int>(key >> shift) & (DIGITS - 1);
}

// How often each digit of each pass occurs, in one read of the keys: counts [passes][256].
template <typename Key>
__global__ void __launch_bounds__(RADIX_THREADS)
    count_digits(const Key* __restrict__ keys, long long count, unsigned long long* counts, int kind) {
    __shared__ unsigned found[sizeof(Key) * DIGITS];
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Key)) * DIGITS; i += RADIX_THREADS) found[i] = 0;
    __syncthreads();
    const long long from = blockIdx.x * static_cast<long long>(COUNT_BLOCK_KEYS);
    const int held = static_cast<int>(min(count - from, static_cast<long long>(COUNT_BLOCK_KEYS)));
#pragma unroll 4
    for (int i = threadIdx.x; i < held; i += RADIX_THREADS) {
        const Key key = ordered(keys[from + i], kind);
#pragma unroll
        for (int pass = 0; pass < static_cast<int>(sizeof(Key)); ++pass)
            atomicAdd(&found[pass * DIGITS + digit_of(key, 8 * pass)], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(Key)) * DIGITS; i += RADIX_THREADS)
        if (found[i] > 0) atomicAdd(counts + i, static_cast<unsigned long long>(found[i]));
}

// Turns counts into the position of each digit's first key, one block per pass.
__global__ void __launch_bounds__(DIGITS) place_digits(const unsigned long long* __restrict__ counts, long long* positions) {
    __shared__ long long warps[DIGITS / 32];
    const int i = blockIdx.x * DIGITS + threadIdx.x;
    long long total;
    positions[i] = exclusive_block_sum<DIGITS>(static_cast<long long>(counts[i]), warps, total);
}

// The lanes of the warp with the same digit.
__device__ inline unsigned lanes_alike(int digit) {
    unsigned alike = WHOLE_WARP;
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
        const bool set = digit >> bit & 1;
        const unsigned with = __ballot_sync(WHOLE_WARP, set);
        alike &= set ? with : ~with;
    }
    return alike;
}

// The number of keys with one digit in all tiles before, by decoupled look-back.
__device__ inline unsigned keys_before(volatile unsigned* states, long long tile, int digit) {
    unsigned before = 0;
    for (long long other = tile - 1; other >= 0; --other) {
        unsigned word;
        do word = states[other * DIGITS + digit];
        while ((word & ~COUNT_BITS) == 0);
        before += word & COUNT_BITS;
        if (word & ALL) break;
    }
    return before;
}

// move_digits: one block per tile, numbered in the order in which blocks start, so that earlier tiles always run. A tile
// counts its digits and publishes the counts; then its warps rank 32 keys at a time by votes, while earlier tiles publish
// theirs. The tile is sorted by digit in shared memory, and writes are coalesced.
//   positions    of each digit's first key; next_positions: the same for the next portion of keys
//   states       [tiles][256], zero; ticket: zero
//   values       null: a key's value is its index
//   kinds        types of the keys before and after: the first pass maps to ordered integers, the last maps back
template <typename Key, typename Value>
__global__ void __launch_bounds__(RADIX_THREADS)
    move_digits(const Key* __restrict__ keys, const Value* __restrict__ values, Key* __restrict__ out,
                Value* __restrict__ out_values, long long first, long long count, const long long* __restrict__ positions,
                long long* next_positions, unsigned* states, unsigned* ticket, int shift, int kind_in, int kind_out) {
    constexpr int EACH = RADIX_ITEMS<Key, Value>, RADIX_TILE = EACH * RADIX_THREADS;
    __shared__ Key staged[RADIX_TILE];
    __shared__ unsigned found[RADIX_WARPS * DIGITS];  // by warp, then digit
    __shared__ long long shifted[DIGITS];  // output position of a digit's keys minus their position in the tile
    __shared__ unsigned sums[RADIX_WARPS];
    __shared__ unsigned turn;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) turn = atomicAdd(ticket, 1u);
    for (int i = threadIdx.x; i < RADIX_WARPS * DIGITS; i += RADIX_THREADS) found[i] = 0;
    __syncthreads();
    const long long tile = turn, from = first + tile * RADIX_TILE, end = first + count;
    const int held = static_cast<int>(min(end - from, static_cast<long long>(RADIX_TILE)));

    Key mine[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = (warp * EACH + k) * 32 + lane;
        mine[k] = i < held ? ordered(keys[from + i], kind_in) : static_cast<Key>(~Key(0));  // beyond the end: last of all
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) atomicAdd(&found[warp * DIGITS + digit_of(mine[k], shift)], 1u);
    __syncthreads();

    // One thread per digit publishes the tile's count at once, so that later tiles need not wait for the ranking.
    unsigned in_tile = 0, total;
#pragma unroll
    for (int w = 0; w < RADIX_WARPS; ++w) in_tile += found[w * DIGITS + threadIdx.x];
    volatile unsigned* const word = states + tile * DIGITS + threadIdx.x;
    *word = (tile == 0 ? ALL : OWN) | in_tile;
    const unsigned start = exclusive_block_sum<RADIX_THREADS>(in_tile, sums, total);
    unsigned place = start;  // in the tile, of each warp's first key of this digit
#pragma unroll
    for (int w = 0; w < RADIX_WARPS; ++w) {
        const unsigned own = found[w * DIGITS + threadIdx.x];
        found[w * DIGITS + threadIdx.x] = place;
        place += own;
    }
    __syncthreads();

    unsigned ranks[EACH];  // within the tile
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int digit = digit_of(mine[k], shift);
        const unsigned alike = lanes_alike(digit), below = __popc(alike & ((1u << lane) - 1));
        const unsigned next = found[warp * DIGITS + digit];
        __syncwarp();
        if (below == 0) found[warp * DIGITS + digit] = next + __popc(alike);
        __syncwarp();
        ranks[k] = next + below;
        staged[ranks[k]] = mine[k];
    }
    const unsigned before = keys_before(states, tile, threadIdx.x);
    if (tile > 0) *word = ALL | (before + in_tile);
    const long long first_place = positions[threadIdx.x] + before;
    shifted[threadIdx.x] = first_place - start;
    if (from + RADIX_TILE >= end) next_positions[threadIdx.x] = first_place + in_tile;
    __syncthreads();

    unsigned digits[(EACH + 3) / 4] = {};  // of the keys that this thread writes, for their values: four in a register
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = k * RADIX_THREADS + threadIdx.x;
        if (i >= held) continue;
        const Key key = staged[i];
        const int digit = digit_of(key, shift);
        out[shifted[digit] + i] = unordered(key, kind_out);
        if constexpr (HAS_VALUES<Value>) digits[k / 4] |= static_cast<unsigned>(digit) << k % 4 * 8;
    }
    if constexpr (HAS_VALUES<Value>) {
        Value* const staged_values = reinterpret_cast<Value*>(staged);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = (warp * EACH + k) * 32 + lane;
            if (i < held) staged_values[ranks[k]] = values ? values[from + i] : static_cast<Value>(from + i);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = k * RADIX_THREADS + threadIdx.x;
            if (i < held) out_values[shifted[digits[k / 4] >> k % 4 * 8 & (DIGITS - 1)] + i] = staged_values[i];
        }
    }
}
