// The vector operations of a FISTA iteration in three passes, with its scalars on the device.
//
// Contract: complex64 vectors of `count` values: x and x of the iteration before, n and n before (the normal operator of
// both), b. `state` holds L, momentum t, β, the objective and whether the step was refused. See kernels.sense.regularized.
//   fista_gradient   v = y − ((n_y − b) + λ₂ y) / L with y = x + β (x − before), n_y likewise; *threshold = λ / L
//   fista_sums       six inner products of the new image w; its last block updates state and status
//   fista_accept     unless refused: before = x, x = w, and the same for their normal operators
// Floors on an H200, 256²: 3, 3 and 4 MiB moved, 0.7 to 1 µs each; a launch in a graph takes 2 µs.
#pragma once

struct Fista {
    double strength, damping, energy, tolerance;
    long long count;
    int monotone;
};

constexpr int FISTA_SUMS = 6;
enum { LIPSCHITZ, MOMENTUM, BETA, OBJECTIVE, REFUSED };

__device__ inline float2 moved(float2 now, float2 before, float beta) {
    return make_float2(now.x + beta * (now.x - before.x), now.y + beta * (now.y - before.y));
}

__device__ inline float2 less(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }

__global__ void __launch_bounds__(THREADS) fista_gradient(
    const float2* __restrict__ x, const float2* __restrict__ before, const float2* __restrict__ n,
    const float2* __restrict__ n_before, const float2* __restrict__ b, const double* state, float2* v, float* threshold,
    Fista fista) {
    grid_dependency_synchronize();
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    const float beta = float(state[BETA]), rate = float(1 / state[LIPSCHITZ]), damping = float(fista.damping);
    if (i == 0) *threshold = float(fista.strength) * rate;
    if (i >= fista.count) return;
    const float2 y = moved(x[i], before[i], beta), normal = moved(n[i], n_before[i], beta);
    v[i] = make_float2(y.x - rate * (normal.x - b[i].x + damping * y.x), y.y - rate * (normal.y - b[i].y + damping * y.y));
}

// Rejects a step that would raise the objective and starts momentum again where it points uphill, both without random
// shifts only, and raises L if the operator bends more than it says.
__device__ inline void fista_update(const double* sums, double size, double* state, double* status, Fista fista) {
    if (status[2] <= fista.tolerance) {  // it rests
        state[REFUSED] = 1;
        return;
    }
    const double squares = sums[0], change = sums[3], bent = sums[4] + fista.damping * change;
    const double fidelity = 0.5 * sums[1] - sums[2] + 0.5 * fista.energy;
    const double objective = fidelity + 0.5 * fista.damping * squares + fista.strength * size;
    const bool refused = fista.monotone && objective > state[OBJECTIVE] * (1 + 1e-6) && state[BETA] > 0;
    const bool again = refused || (fista.monotone && sums[5] < 0);
    const double t = state[MOMENTUM], following = again ? 1.0 : 0.5 + sqrt(0.25 + t * t);
    state[LIPSCHITZ] = fmax(state[LIPSCHITZ], bent / fmax(change, 1e-300));
    state[BETA] = again ? 0.0 : (t - 1) / following;
    state[MOMENTUM] = following;
    state[REFUSED] = refused;
    status[2] = refused ? 1.0 : sqrt(change / fmax(squares, 1e-300));
    if (refused) return;
    state[OBJECTIVE] = status[0] = objective;
    status[1] = sqrt(2 * fmax(fidelity, 0.0) / fmax(fista.energy, 1e-300));
}

__global__ void __launch_bounds__(THREADS) fista_sums(
    const float2* __restrict__ w, const float2* __restrict__ n_w, const float2* __restrict__ x,
    const float2* __restrict__ before, const float2* __restrict__ n, const float2* __restrict__ b, const double* size,
    double* parts, unsigned* ticket, double* state, double* status, Fista fista) {
    grid_dependency_synchronize();
    __shared__ double shared[THREADS / 32], totals[FISTA_SUMS];
    __shared__ bool last;
    const float beta = float(state[BETA]);
    double sums[FISTA_SUMS] = {};
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < fista.count; i += (long long)gridDim.x * THREADS) {
        const float2 change = less(w[i], x[i]), step = less(w[i], moved(x[i], before[i], beta));
        sums[0] += product(w[i], w[i]);
        sums[1] += product(w[i], n_w[i]);
        sums[2] += product(w[i], b[i]);
        sums[3] += product(change, change);
        sums[4] += product(change, less(n_w[i], n[i]));
        sums[5] += product(step, change);
    }
    for (int k = 0; k < FISTA_SUMS; k++) {
        const double part = block_sum(sums[k], shared);
        if (threadIdx.x == 0) parts[k * gridDim.x + blockIdx.x] = part;
    }
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    for (int k = 0; k < FISTA_SUMS; k++) {
        double total = 0;
        for (int block = threadIdx.x; block < gridDim.x; block += THREADS)
            total += ((volatile double*)parts)[k * gridDim.x + block];
        total = block_sum(total, shared);
        if (threadIdx.x == 0) totals[k] = total;
    }
    if (threadIdx.x == 0) {
        fista_update(totals, *size, state, status, fista);
        *ticket = 0;
    }
}

__global__ void __launch_bounds__(THREADS) fista_accept(
    const float2* __restrict__ w, const float2* __restrict__ n_w, float2* x, float2* before, float2* n, float2* n_before,
    const double* state, long long count) {
    grid_dependency_synchronize();
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count || state[REFUSED] != 0) return;
    before[i] = x[i];
    x[i] = w[i];
    n_before[i] = n[i];
    n[i] = n_w[i];
}
