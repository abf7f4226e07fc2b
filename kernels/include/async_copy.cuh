// Copies from global to shared memory that do not wait and take no registers (sm_80 on; before that, ordinary ones).
#pragma once

// L2 fetches so many bytes around them at once: whole lines, or two, cost memory less than sectors one by one.
template <int FETCHED = 128>
__device__ inline void copy_16_bytes(void* shared, const void* global) {
    static_assert(FETCHED == 128 || FETCHED == 256, "what L2 can fetch at once");
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (FETCHED == 128)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
    else asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    *static_cast<uint4*>(shared) = __ldg(static_cast<const uint4*>(global));
#endif
}

// The calling thread's copies have arrived. Others see them after a barrier.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What the calling thread has copied since it last said so is one group.
__device__ inline void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All of its groups but the last have arrived.
__device__ inline void wait_for_copies_but_last() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}
