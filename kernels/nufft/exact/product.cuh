// Tensor-core building blocks of the exact transform: fp16 pairs, matrices from shared memory, m16n8k16 products. sm_80 on.
#pragma once

#include "async_copy.cuh"
#include "exact/phases.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define EXACT_TENSOR 1
#endif

#ifdef EXACT_TENSOR

// Two fp16 numbers, `first` in the lower half.
__device__ inline unsigned pair_of(float first, float second) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// The rounding remainders of `pair_of`, as a pair: together they keep 22 bits.
__device__ inline unsigned rest_of(unsigned pair, float first, float second) {
    float a, b;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(pair));
    return pair_of(first - a, second - b);
}

struct Fragment {
    unsigned part[4];
};

__device__ inline unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Four 8 × 8 matrices; a lane passes the address of one row and receives two neighbours of a row, or of a column.
__device__ inline Fragment load_matrices(unsigned row) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3]) : "r"(row));
    return f;
}

__device__ inline Fragment load_transposed(unsigned row) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3]) : "r"(row));
    return f;
}

__device__ inline void multiply_add(float (&sum)[4], const Fragment& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_to(float (&sum)[4], const Fragment& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "r"(a.part[0]), "r"(a.part[1]), "r"(a.part[2]), "r"(a.part[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Asynchronous copies are counted in groups, the last GOING_ON of which may stay in flight.
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GOING_ON>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GOING_ON) : "memory");
}

__device__ inline void store_shared(unsigned to, const Fragment& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.part[0]), "r"(value.part[1]),
                 "r"(value.part[2]), "r"(value.part[3]) : "memory");
}

#endif

// Twice the distance of column pair number `pair` from the middle of an axis of `size`, in grid steps.
__host__ __device__ inline int twice_distance(int pair, int size) { return 2 * pair + 1 - size % 2; }
