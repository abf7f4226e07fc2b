// The proximal operator of local low rank in one pass: a block an image block.
//
// Contract: complex64 series [frames][size 0][size 1][size 2], read at places rotated by `shift` (the last `shifted` axes;
// null: none) and written there in `out`, another array. Of a block, M is (pixels × frames). With M^H M = V diag(σ²) V^H,
// M becomes M V diag(max(σ − *threshold, 0) / σ) V^H, and *sum the sum of all max(σ − *threshold, 0).
//
// The eigenvalues come from Jacobi rotations of disjoint pairs at a time (Golub, Van Loan, Matrix Computations, 8.5), all in
// shared memory. Floor in 3-D, five coefficients of 256³: 671 MB read twice and written, 0.5 ms on an H200.
#pragma once

struct Blocks {
    int frames, even;  // even: frames, or one more
    int size[3], block[3], count[3];
    int shifted;
};

constexpr int LOW_RANK_PIXELS = 64, LOW_RANK_SWEEPS = 12;  // pixels of a block that are in shared memory at a time
constexpr float LOW_RANK_LEFT = 1e-12f;                    // square of what is off the diagonal, relative to the diagonal's

struct Rotation {
    float cosine;
    float2 sine;  // times the phase of the element that it removes
};

__device__ inline float2 times(float2 a, float2 b) { return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
__device__ inline float2 conjugate(float2 a) { return make_float2(a.x, -a.y); }
__device__ inline float2 sum_of(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ inline float2 scaled(float2 a, float by) { return make_float2(a.x * by, a.y * by); }

// The pair of a round-robin tournament of n players, n even: in each of n − 1 rounds everyone plays once.
__device__ inline void pair_of_round(int n, int round, int number, int& p, int& q) {
    const int one = number == 0 ? n - 1 : (round + number) % (n - 1), other = (round + n - 1 - number) % (n - 1);
    p = min(one, other), q = max(one, other);
}

// Turns columns p and q of a matrix, or with TRANSPOSED rows by the conjugate.
template <bool TRANSPOSED>
__device__ inline void turn_pairs(float2* matrix, const Rotation* rotations, int n, int round) {
    for (int i = threadIdx.x; i < n * (n / 2); i += THREADS) {
        const int along = i % n, number = i / n;
        int p, q;
        pair_of_round(n, round, number, p, q);
        const Rotation by = rotations[number];
        float2& first = matrix[TRANSPOSED ? p * n + along : along * n + p];
        float2& second = matrix[TRANSPOSED ? q * n + along : along * n + q];
        const float2 sine = TRANSPOSED ? by.sine : conjugate(by.sine);
        const float2 a = first, b = second, b_turned = times(sine, b), a_turned = times(conjugate(sine), a);
        first = make_float2(by.cosine * a.x - b_turned.x, by.cosine * a.y - b_turned.y);
        second = make_float2(a_turned.x + by.cosine * b.x, a_turned.y + by.cosine * b.y);
    }
}

__device__ inline Rotation rotation_of(const float2* gram, int n, int p, int q) {
    const float2 off = gram[p * n + q];
    const float size = sqrtf(off.x * off.x + off.y * off.y);
    if (!(size > 1e-30f)) return {1, make_float2(0, 0)};
    const float tau = (gram[q * n + q].x - gram[p * n + p].x) / (2 * size);
    const float tangent = copysignf(1 / (fabsf(tau) + sqrtf(1 + tau * tau)), tau), cosine = rsqrtf(1 + tangent * tangent);
    return {cosine, scaled(off, cosine * tangent / size)};
}

// gram becomes diagonal, vectors the eigenvectors in columns. Elements of an added row and column are 0 and stay so.
__device__ inline void eigenvectors(float2* gram, float2* vectors, Rotation* rotations, int n, double* shared) {
    __shared__ bool done;
    for (int i = threadIdx.x; i < n * n; i += THREADS) vectors[i] = make_float2(i / n == i % n, 0);
    for (int sweep = 0; sweep < LOW_RANK_SWEEPS; sweep++) {
        double off = 0, whole = 0;
        for (int i = threadIdx.x; i < n * n; i += THREADS) {
            const double square = double(gram[i].x) * gram[i].x + double(gram[i].y) * gram[i].y;
            if (i / n == i % n) whole += square;
            else off += square;
        }
        off = block_sum(off, shared);
        whole = block_sum(whole, shared);
        if (threadIdx.x == 0) done = off <= LOW_RANK_LEFT * whole;
        __syncthreads();
        if (done) return;
        for (int round = 0; round < n - 1; round++) {
            for (int number = threadIdx.x; number < n / 2; number += THREADS) {
                int p, q;
                pair_of_round(n, round, number, p, q);
                rotations[number] = rotation_of(gram, n, p, q);
            }
            __syncthreads();
            turn_pairs<false>(gram, rotations, n, round);
            turn_pairs<false>(vectors, rotations, n, round);
            __syncthreads();
            turn_pairs<true>(gram, rotations, n, round);
            __syncthreads();
        }
    }
}

// Places in the image of pixels `first` … of a block, −1 for those beyond.
__device__ inline void places_of(long long* places, int first, const int* shift, const Blocks& g) {
    if (threadIdx.x >= LOW_RANK_PIXELS) return;
    int inside = first + threadIdx.x, number = blockIdx.x, at[3];
    bool there = inside < g.block[0] * g.block[1] * g.block[2];
    for (int axis = 2; axis >= 0; axis--) {
        at[axis] = number % g.count[axis] * g.block[axis] + inside % g.block[axis];
        number /= g.count[axis];
        inside /= g.block[axis];
        there = there && at[axis] < g.size[axis];
        const int own = axis - (3 - g.shifted);
        if (shift && own >= 0) at[axis] = ((at[axis] + shift[own]) % g.size[axis] + g.size[axis]) % g.size[axis];
    }
    places[threadIdx.x] = there ? (static_cast<long long>(at[0]) * g.size[1] + at[1]) * g.size[2] + at[2] : -1;
}

__device__ inline void load_pixels(float2* tile, const float2* series, const long long* places, const Blocks& g) {
    const long long pixels = static_cast<long long>(g.size[0]) * g.size[1] * g.size[2];
    for (int i = threadIdx.x; i < g.frames * LOW_RANK_PIXELS; i += THREADS) {
        const long long place = places[i % LOW_RANK_PIXELS];
        tile[i] = place < 0 ? make_float2(0, 0) : series[i / LOW_RANK_PIXELS * pixels + place];
    }
}

// Adds the tile's part of M^H M; a warp an element.
__device__ inline void add_gram(float2* gram, const float2* tile, int frames, int n) {
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < frames * frames; i += THREADS / 32) {
        const int row = i / frames, column = i % frames;
        if (row > column) continue;
        float2 part = make_float2(0, 0);
        for (int pixel = lane; pixel < LOW_RANK_PIXELS; pixel += 32)
            part = sum_of(part, times(conjugate(tile[row * LOW_RANK_PIXELS + pixel]), tile[column * LOW_RANK_PIXELS + pixel]));
        for (int step = 16; step > 0; step /= 2) {
            part.x += __shfl_down_sync(0xffffffffu, part.x, step);
            part.y += __shfl_down_sync(0xffffffffu, part.y, step);
        }
        if (lane != 0) continue;
        if (row == column) part.y = 0;
        gram[row * n + column] = sum_of(gram[row * n + column], part);
        if (row != column) gram[column * n + row] = conjugate(gram[row * n + column]);
    }
}

__global__ void __launch_bounds__(THREADS) low_rank(
    const float2* __restrict__ series, float2* __restrict__ out, const float* threshold, const int* shift, double* parts,
    unsigned* ticket, double* sum, Blocks g) {
    __shared__ double shared[THREADS / 32];
    __shared__ long long places[LOW_RANK_PIXELS];
    extern __shared__ float2 memory[];
    const int n = g.even, pixels = g.block[0] * g.block[1] * g.block[2];
    float2 *gram = memory, *vectors = gram + n * n, *tile = vectors + n * n;
    Rotation* rotations = reinterpret_cast<Rotation*>(tile + g.frames * LOW_RANK_PIXELS);
    float* factors = reinterpret_cast<float*>(rotations + n / 2);
    for (int i = threadIdx.x; i < n * n; i += THREADS) gram[i] = make_float2(0, 0);
    for (int first = 0; first < pixels; first += LOW_RANK_PIXELS) {
        __syncthreads();
        places_of(places, first, shift, g);
        __syncthreads();
        load_pixels(tile, series, places, g);
        __syncthreads();
        add_gram(gram, tile, g.frames, n);
    }
    __syncthreads();
    eigenvectors(gram, vectors, rotations, n, shared);
    const float by = *threshold;
    double kept = 0;
    for (int k = threadIdx.x; k < n; k += THREADS) {
        const float square = gram[k * n + k].x, size = square <= 0 ? 0 : sqrtf(square);  // NaN stays
        factors[k] = size > by ? (size - by) / size : size <= by ? 0.0f : size;
        kept += size > by ? size - by : size <= by ? 0.0f : size;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < g.frames * g.frames; i += THREADS) {
        const int row = i / g.frames, column = i % g.frames;
        float2 value = make_float2(0, 0);
        for (int k = 0; k < n; k++)
            value = sum_of(value, scaled(times(vectors[row * n + k], conjugate(vectors[column * n + k])), factors[k]));
        gram[row * n + column] = value;
    }
    const long long stride = static_cast<long long>(g.size[0]) * g.size[1] * g.size[2];
    for (int first = 0; first < pixels; first += LOW_RANK_PIXELS) {
        __syncthreads();
        if (pixels > LOW_RANK_PIXELS) {  // else they are there still
            places_of(places, first, shift, g);
            __syncthreads();
            load_pixels(tile, series, places, g);
            __syncthreads();
        }
        for (int i = threadIdx.x; i < g.frames * LOW_RANK_PIXELS; i += THREADS) {
            const int frame = i / LOW_RANK_PIXELS, pixel = i % LOW_RANK_PIXELS;
            float2 value = make_float2(0, 0);
            for (int k = 0; k < g.frames; k++)
                value = sum_of(value, times(tile[k * LOW_RANK_PIXELS + pixel], gram[k * n + frame]));
            if (places[pixel] >= 0) out[frame * stride + places[pixel]] = value;
        }
    }
    add_up(kept, parts, ticket, sum, shared);
}
