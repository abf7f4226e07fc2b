// How warps tell others of their block that they are done, turn by turn: a turn ends with its COUNT-th arrival, of a thread.
// What a thread wrote before it arrived is seen after the turn has been waited for. (One lane could arrive for its warp,
// after __syncwarp: the memory model allows it, but compute-sanitizer does not follow it, and it is no faster.) Nobody waits
// for a turn but the last or the next.
#pragma once

typedef unsigned long long Signal;  // in shared memory

template <int COUNT>
__device__ __forceinline__ void reset(Signal* signal) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(signal));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(COUNT) : "memory");
#else
    *signal = 0;
#endif
}

__device__ __forceinline__ void arrive(Signal* signal) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(signal));
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
#else
    __threadfence_block();
    atomicAdd(signal, 1);
#endif
}

// Whether a turn has ended.
template <int COUNT>
__device__ __forceinline__ bool has_ended(Signal* signal, int turn) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(signal));
    unsigned ended;
    asm volatile("{ .reg .pred ended; mbarrier.test_wait.parity.shared.b64 ended, [%1], %2; selp.u32 %0, 1, 0, ended; }"
                 : "=r"(ended)
                 : "r"(at), "r"(turn & 1)
                 : "memory");
    return ended;
#else
    const bool ended = *static_cast<volatile Signal*>(signal) >= static_cast<Signal>(turn + 1) * COUNT;
    __threadfence_block();
    return ended;
#endif
}

template <int COUNT>
__device__ __forceinline__ void wait_for(Signal* signal, int turn) {
    while (!has_ended<COUNT>(signal, turn)) {}
}
