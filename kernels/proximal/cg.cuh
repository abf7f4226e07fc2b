// The vector operations of an iteration of conjugate gradients in three passes, with its scalars on the device.
//
// Contract: complex64 vectors of `count` values: solution x, residual r, direction d, and n, the normal operator of d.
// `state` holds r², b², the rate, the ratio of residuals and the tolerance, at which it rests; `status` the relative residual.
//   cg_begin     x = 0, r = d = b; the state of the start
//   cg_rate      rate = r² / (d · (n + λ d))
//   cg_advance   x += rate d, r −= rate (n + λ d); the new r², ratio and status
//   cg_turn      d = r + ratio d
// Floors on an H200, 256²: 1, 3 and 1.5 MiB moved, under 1 µs each; a launch in a graph takes 2 µs.
#pragma once

struct Cg {
    double tolerance;
    float damping;
    long long count;
};

enum { NOW, WHOLE, RATE, RATIO, TOLERANCE };
constexpr double CG_SMALLEST = 1e-300;

__device__ inline float2 damped(float2 normal, float2 direction, float damping) {
    return make_float2(normal.x + damping * direction.x, normal.y + damping * direction.y);
}

__global__ void __launch_bounds__(THREADS) cg_begin(
    const float2* __restrict__ right, float2* x, float2* r, float2* d, double* parts, unsigned* ticket, double* state,
    double* status, Cg cg) {
    grid_dependency_synchronize();
    __shared__ double shared[THREADS / 32];
    double part = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < cg.count; i += (long long)gridDim.x * THREADS) {
        const float2 value = right[i];
        x[i] = make_float2(0, 0), r[i] = value, d[i] = value;
        part += product(value, value);
    }
    if (!add_up(part, parts, ticket, state + NOW, shared)) return;
    state[WHOLE] = state[NOW];
    state[TOLERANCE] = cg.tolerance;
    *status = __longlong_as_double(0x7ff0000000000000LL);
}

__global__ void __launch_bounds__(THREADS) cg_rate(
    const float2* __restrict__ d, const float2* __restrict__ n, double* parts, unsigned* ticket, double* state,
    const double* status, Cg cg) {
    grid_dependency_synchronize();
    __shared__ double shared[THREADS / 32];
    double part = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < cg.count; i += (long long)gridDim.x * THREADS)
        part += product(d[i], damped(n[i], d[i], cg.damping));
    if (!add_up(part, parts, ticket, state + RATE, shared)) return;
    state[RATE] = *status <= state[TOLERANCE] ? 0 : state[NOW] / fmax(state[RATE], CG_SMALLEST);
}

__global__ void __launch_bounds__(THREADS) cg_advance(
    float2* x, float2* r, const float2* __restrict__ d, const float2* __restrict__ n, double* parts, unsigned* ticket,
    double* state, double* status, Cg cg) {
    grid_dependency_synchronize();
    __shared__ double shared[THREADS / 32];
    const float rate = float(state[RATE]);
    double part = 0;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < cg.count; i += (long long)gridDim.x * THREADS) {
        const float2 direction = d[i], image = damped(n[i], direction, cg.damping);
        float2 solution = x[i], residual = r[i];
        solution.x += rate * direction.x, solution.y += rate * direction.y;
        residual.x -= rate * image.x, residual.y -= rate * image.y;
        x[i] = solution, r[i] = residual;
        part += product(residual, residual);
    }
    __shared__ double following;
    if (!add_up(part, parts, ticket, &following, shared)) return;
    state[RATIO] = following / fmax(state[NOW], CG_SMALLEST);
    state[NOW] = following;
    *status = sqrt(following / fmax(state[WHOLE], CG_SMALLEST));
}

__global__ void __launch_bounds__(THREADS) cg_turn(const float2* __restrict__ r, float2* d, const double* state, long long count) {
    grid_dependency_synchronize();
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const float ratio = float(state[RATIO]);
    d[i] = make_float2(r[i].x + ratio * d[i].x, r[i].y + ratio * d[i].y);
}
