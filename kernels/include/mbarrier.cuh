// Mbarriers: barriers in shared memory on which some threads of a block arrive and others wait, phase by phase; before sm_90
// a counter takes their place. A phase ends with its COUNT-th arrival. What a thread wrote before it arrived is visible to
// those that have waited for the phase. A thread may wait for the last phase or the next, but for no other.
// Every lane arrives: the memory model also allows one lane to arrive for its warp after __syncwarp, but compute-sanitizer
// does not follow that, and it is no faster.
#pragma once

typedef unsigned long long Mbarrier;  // in shared memory

template <int COUNT>
__device__ __forceinline__ void init(Mbarrier* barrier) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(COUNT) : "memory");
#else
    *barrier = 0;
#endif
}

__device__ __forceinline__ void arrive(Mbarrier* barrier) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
#else
    __threadfence_block();
    atomicAdd(barrier, 1);
#endif
}

// Whether a phase has ended.
template <int COUNT>
__device__ __forceinline__ bool test_wait(Mbarrier* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    unsigned ended;
    asm volatile("{ .reg .pred ended; mbarrier.test_wait.parity.shared.b64 ended, [%1], %2; selp.u32 %0, 1, 0, ended; }"
                 : "=r"(ended)
                 : "r"(at), "r"(phase & 1)
                 : "memory");
    return ended;
#else
    const bool ended = *static_cast<volatile Mbarrier*>(barrier) >= static_cast<Mbarrier>(phase + 1) * COUNT;
    __threadfence_block();
    return ended;
#endif
}

template <int COUNT>
__device__ __forceinline__ void wait(Mbarrier* barrier, int phase) {
    while (!test_wait<COUNT>(barrier, phase)) {}
}
