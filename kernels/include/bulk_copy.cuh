// Bulk copies of whole rows between global and shared memory, each started by one thread (sm_90 on). Addresses and sizes
// are multiples of 16 bytes. L2 prefers to keep rows that will be read once more.
#pragma once

__device__ inline unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// Orders earlier reads and writes of shared memory before later bulk copies.
__device__ inline void fence_bulk_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// An mbarrier on which bytes arrive; in each phase, `count` threads announce how many.
__device__ inline void init_arrival(unsigned long long* arrival, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrival)), "r"(count) : "memory");
#endif
}

__device__ inline void wait_for_arrival(unsigned arrival, int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nwaiting:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra waiting;\n}" ::"r"(
            arrival),
        "r"(phase & 1)
        : "memory");
#endif
}

// The L2 cache policy of a copy. keep: its bytes will be read again.
__device__ inline unsigned long long bulk_policy(bool keep) {
    unsigned long long last = 0, first = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
#endif
    return keep ? last : first;
}

// `shared` and `arrival` are addresses in shared memory.
__device__ inline void bulk_load(unsigned shared, const void* global, int bytes, unsigned arrival, unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(arrival), "r"(bytes) : "memory");
    if (bytes == 0) return;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(arrival), "l"(policy)
        : "memory");
#endif
}

// Whether this thread is the warp's elected one: unlike with a test for lane 0, the compiler knows that there is only one.
__device__ inline bool elected() {
    unsigned yes = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n@p mov.b32 %0, 1;\n}" : "+r"(yes));
#endif
    return yes;
}

// Stores bytes that will not be read soon. `shared` may be overwritten after the thread's next wait_for_bulk_stores.
__device__ inline void bulk_store(void* global, const void* shared, int bytes) {
#if __CUDA_ARCH__ >= 900
    unsigned long long first;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\ncp.async.bulk.commit_group;" ::"l"(
            global),
        "r"(shared_address(shared)), "r"(bytes), "l"(first)
        : "memory");
#endif
}

__device__ inline void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
