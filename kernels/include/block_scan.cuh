// Sums over a block's threads, by shuffles within warps and one row of shared memory between them.
#pragma once

constexpr unsigned WHOLE_WARP = 0xffffffffu;

template <typename T>
__device__ inline T inclusive_warp_sum(T value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T below = __shfl_up_sync(WHOLE_WARP, value, step);
        if (lane >= step) value += below;
    }
    return value;
}

// The sum over a warp's lanes.
__device__ inline int warp_sum(int value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, value);
#else
    for (int reach = 16; reach > 0; reach /= 2) value += __shfl_xor_sync(~0u, value, reach);
    return value;
#endif
}

// The sum of the values of the threads before this one; `total` is that of all. `warps` is shared memory for THREADS / 32
// values, free again after the block's next barrier.
template <int THREADS, typename T>
__device__ inline T exclusive_block_sum(T value, T* warps, T& total) {
    static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps, and one warp adds up their sums");
    constexpr int WARPS = THREADS / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const T inclusive = inclusive_warp_sum(value);
    if (lane == 31) warps[warp] = inclusive;
    __syncthreads();
    if (warp == 0) {
        const T sums = inclusive_warp_sum(lane < WARPS ? warps[lane] : T(0));
        __syncwarp();
        if (lane < WARPS) warps[lane] = sums;
    }
    __syncthreads();
    total = warps[WARPS - 1];
    return (warp > 0 ? warps[warp - 1] : T(0)) + inclusive - value;
}
