// Asynchronous copies from global to shared memory, which take no registers (sm_80 on; before that, ordinary copies).
#pragma once

// FETCHED: bytes that L2 fetches around them at once. One or two whole lines cost memory less than single sectors.
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

// The same of one word of 4 or 8 bytes.
template <typename Word>
__device__ inline void copy_word(Word* shared, const Word* global) {
    static_assert(sizeof(Word) == 4 || sizeof(Word) == 8, "what can be copied through L1");
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(sizeof(Word)) : "memory");
#else
    *shared = __ldg(global);
#endif
}

// Waits for the calling thread's copies. Other threads see them after a barrier.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Makes a group of the calling thread's copies since the last call.
__device__ inline void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of the thread's groups but the last COUNT.
template <int COUNT>
__device__ inline void wait_for_copies_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}

// Waits for all of the thread's groups but the last.
__device__ inline void wait_for_copies_but_last() { wait_for_copies_but<1>(); }
