// Copies of whole rows between global and shared memory that one thread asks for (sm_90 on). Addresses and sizes are
// multiples of 16 bytes. Rows that will be read once more stay in L2 before all that passes through.
#pragma once

__device__ inline unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// What was written to shared memory so far is there for bulk copies, and what they will overwrite has been read.
__device__ inline void fence_bulk_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A barrier on which bytes arrive: `count` threads say how many to expect, each time anew.
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

// What is to become of bytes in L2. keep: they will be wanted again.
__device__ inline unsigned long long bulk_policy(bool keep) {
    unsigned long long last = 0, first = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
#endif
    return keep ? last : first;
}

// To and for addresses in shared memory.
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

// Whether this is the one thread of the warp that is to ask: the compiler knows that it is one, where it does not for lane 0.
__device__ inline bool elected() {
    unsigned yes = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n@p mov.b32 %0, 1;\n}" : "+r"(yes));
#endif
    return yes;
}

// Bytes that nobody will soon want. The thread's next wait_for_bulk_stores says when `shared` may be written again.
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
