// The far field of a full electrostatic sum on a mesh; the contract is in kernels/ewald/__init__.py.
//
// bricks    the brick of 8 × 8 × 8 mesh points that each atom lies in; sorted by it, neighbours are added together, while
//           their part of a mesh larger than the L2 cache is in it
// spread    charges to the mesh: a warp an atom, 64-bit integer additions, so that their order does not matter
// scaled    integers to floats, before the FFT (cuFFT)
// along_z, along_y, along_x
//           the mesh at the points of a grid along its axes: one axis after another, T taps each; the last adds to the map
// gather    the mesh at the points of a grid, its axes oblique: T³ taps a point
//
// Floors for M mesh points, P points, A atoms and T taps an axis, on a device with B bytes a second:
//   spread    A T³ additions in the L2 cache, two sectors for each row of taps: A T² 2 / (sectors a second)
//   along_x   8 P / B: the map is read and written; the planes of the mesh that it reads stay in the L2 cache
//   gather    P T³ loads from the L1 and L2 caches
//
// The mesh is [x, y, z], z fastest, and wraps around. Window polynomials are [taps][degree + 1], constant first, of the
// rest 0 … 1 (mesh.py). Sources: as in kernels/ewald/__init__.py.

struct Far {
    double origin[3], to_mesh[9];  // position - origin, times this matrix (row by row), is in mesh points
    double scale;                  // integers per unit of charge
    int shape[3];
};

struct Lattice {
    double origin[3], step[3];
    double ramp[4];  // added to the map: constant, and per angstrom along x, y, z
    int first[3], shape[3];
};

constexpr int SPREAD_THREADS = 128, READ_THREADS = 128, PLANES = 8;

template <int TAPS>
constexpr int COEFFICIENTS = TAPS + 4;

// Position in mesh points along an axis.
__device__ inline double mesh_place(const double (&at)[3], const Far& far, int axis) {
    return at[0] * far.to_mesh[axis] + at[1] * far.to_mesh[3 + axis] + at[2] * far.to_mesh[6 + axis];
}

__device__ inline int wrapped(long long index, int count) {
    const int rest = static_cast<int>(index % count);
    return rest < 0 ? rest + count : rest;
}

template <typename Real>
__global__ void bricks(const Real* __restrict__ atoms, unsigned* __restrict__ keys, const __grid_constant__ Far far,
                       long long count) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= count) return;
    const double at[3] = {atoms[4 * i] - far.origin[0], atoms[4 * i + 1] - far.origin[1], atoms[4 * i + 2] - far.origin[2]};
    unsigned key = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const int place = wrapped(static_cast<long long>(floor(mesh_place(at, far, axis))), far.shape[axis]);
        key = key * ((far.shape[axis] + 7) / 8) + place / 8;
    }
    keys[i] = key;
}

// order: the atoms' numbers in the order to add them, or null.
template <typename Real, int TAPS>
__global__ void __launch_bounds__(SPREAD_THREADS)
spread(const Real* __restrict__ atoms, const double* __restrict__ polynomials, unsigned long long* __restrict__ mesh,
       const __grid_constant__ Far far, long long count, const long long* __restrict__ order) {
    __shared__ double weights[SPREAD_THREADS / 32][3 * TAPS];
    __shared__ int places[SPREAD_THREADS / 32][3 * TAPS];
    const long long number = (blockIdx.x * static_cast<long long>(SPREAD_THREADS) + threadIdx.x) / 32;
    if (number >= count) return;
    const long long atom = order == nullptr ? number : order[number];
    const int lane = threadIdx.x % 32;
    double* const weight = weights[threadIdx.x / 32];
    int* const place = places[threadIdx.x / 32];
    const double charge = atoms[4 * atom + 3] * far.scale;
    if (charge == 0) return;
    if (lane < 3 * TAPS) {
        const int axis = lane / TAPS, tap = lane % TAPS;
        const double at[3] = {atoms[4 * atom] - far.origin[0], atoms[4 * atom + 1] - far.origin[1],
                              atoms[4 * atom + 2] - far.origin[2]};
        const double from = mesh_place(at, far, axis) - 0.5 * TAPS, first = floor(from) + 1, rest = from + 1 - first;
        const double* const piece = polynomials + tap * COEFFICIENTS<TAPS>;
        double value = 0;
#pragma unroll
        for (int k = COEFFICIENTS<TAPS> - 1; k >= 0; --k) value = fma(value, rest, piece[k]);
        weight[lane] = value;
        place[lane] = wrapped(static_cast<long long>(first) + tap, far.shape[axis]);
    }
    __syncwarp();
    for (int n = lane; n < TAPS * TAPS * TAPS; n += 32) {
        const int a = n / (TAPS * TAPS), b = TAPS + n / TAPS % TAPS, c = 2 * TAPS + n % TAPS;
        const long long to = (place[a] * static_cast<long long>(far.shape[1]) + place[b]) * far.shape[2] + place[c];
        const long long amount = __double2ll_rn(charge * weight[a] * weight[b] * weight[c]);
        atomicAdd(mesh + to, static_cast<unsigned long long>(amount));
    }
}

template <typename Real>
__global__ void scaled(const long long* __restrict__ mesh, Real* __restrict__ out, double factor, long long count) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < count) out[i] = static_cast<Real>(mesh[i] * factor);
}

// out[i, j, z] = sum over taps of weights[z, t] mesh[rows_x[i], rows_y[j], taps[z, t]]: a block a row (i, j).
template <int TAPS>
__global__ void __launch_bounds__(READ_THREADS)
along_z(const float* __restrict__ mesh, const int* __restrict__ rows_x, const int* __restrict__ rows_y,
        const int* __restrict__ taps, const float* __restrict__ weights, float* __restrict__ out, int rows, int points,
        int n1, int n2) {
    const int i = blockIdx.x / rows, j = blockIdx.x % rows;
    const float* const row = mesh + (rows_x[i] * static_cast<long long>(n1) + rows_y[j]) * n2;
    float* const to = out + blockIdx.x * static_cast<long long>(points);
    for (int z = threadIdx.x; z < points; z += READ_THREADS) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TAPS; ++t) sum = fmaf(weights[z * TAPS + t], row[taps[z * TAPS + t]], sum);
        to[z] = sum;
    }
}

// out[i, y, z] = sum over taps of weights[y, t] in[i, taps[y, t], z]: a block a row (i, y).
template <int TAPS>
__global__ void __launch_bounds__(READ_THREADS)
along_y(const float* __restrict__ in, const int* __restrict__ taps, const float* __restrict__ weights,
        float* __restrict__ out, int rows, int count_y, int points) {
    const int i = blockIdx.x / count_y, y = blockIdx.x % count_y;
    const float* from[TAPS];
    float weight[TAPS];
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
        from[t] = in + (i * static_cast<long long>(rows) + taps[y * TAPS + t]) * points;
        weight[t] = weights[y * TAPS + t];
    }
    float* const to = out + blockIdx.x * static_cast<long long>(points);
    for (int z = threadIdx.x; z < points; z += READ_THREADS) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TAPS; ++t) sum = fmaf(weight[t], from[t][z], sum);
        to[z] = sum;
    }
}

// map[x, y, z] += sum over taps of weights[x, t] in[taps[x, t], y, z], and the ramp: a block a row of PLANES planes, whose
// taps overlap, so that most of them come from the L1 cache.
template <int TAPS>
__global__ void __launch_bounds__(READ_THREADS)
along_x(const float* __restrict__ in, const int* __restrict__ taps, const float* __restrict__ weights,
        float* __restrict__ map, const __grid_constant__ Lattice grid) {
    __shared__ float weight[PLANES][TAPS];
    __shared__ long long from[PLANES][TAPS];
    const int nx = grid.shape[0], ny = grid.shape[1], nz = grid.shape[2];
    const int x0 = blockIdx.x / ny * PLANES, y = blockIdx.x % ny, planes = min(PLANES, nx - x0);
    for (int n = threadIdx.x; n < planes * TAPS; n += READ_THREADS) {
        weight[n / TAPS][n % TAPS] = weights[x0 * TAPS + n];
        from[n / TAPS][n % TAPS] = (taps[x0 * TAPS + n] * static_cast<long long>(ny) + y) * nz;
    }
    __syncthreads();
    const bool tilted = grid.ramp[0] != 0 || grid.ramp[1] != 0 || grid.ramp[2] != 0 || grid.ramp[3] != 0;
    const double py = grid.origin[1] + (grid.first[1] + y) * grid.step[1];
    for (int z = threadIdx.x; z < nz; z += READ_THREADS) {
        const double pz = grid.origin[2] + (grid.first[2] + z) * grid.step[2];
        for (int p = 0; p < planes; ++p) {
            float sum = 0;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) sum = fmaf(weight[p][t], in[from[p][t] + z], sum);
            if (tilted) {
                const double px = grid.origin[0] + (grid.first[0] + x0 + p) * grid.step[0];
                sum += static_cast<float>(grid.ramp[0] + grid.ramp[1] * px + grid.ramp[2] * py + grid.ramp[3] * pz);
            }
            map[((x0 + p) * static_cast<long long>(ny) + y) * nz + z] += sum;
        }
    }
}

// map += the mesh at each point through the window along the mesh's own axes, and the ramp: a thread a point, a block a
// row.
template <int TAPS>
__global__ void __launch_bounds__(READ_THREADS)
gather(const float* __restrict__ mesh, const double* __restrict__ polynomials, float* __restrict__ map,
       const __grid_constant__ Far far, const __grid_constant__ Lattice grid) {
    __shared__ float pieces[TAPS * COEFFICIENTS<TAPS>];
    for (int n = threadIdx.x; n < TAPS * COEFFICIENTS<TAPS>; n += READ_THREADS) pieces[n] = polynomials[n];
    __syncthreads();
    const int x = blockIdx.x / grid.shape[1], y = blockIdx.x % grid.shape[1];
    const double px = grid.origin[0] + (grid.first[0] + x) * grid.step[0];
    const double py = grid.origin[1] + (grid.first[1] + y) * grid.step[1];
    for (int z = threadIdx.x; z < grid.shape[2]; z += READ_THREADS) {
        const double pz = grid.origin[2] + (grid.first[2] + z) * grid.step[2];
        const double at[3] = {px - far.origin[0], py - far.origin[1], pz - far.origin[2]};
        float weight[3][TAPS];
        int place[3];
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
            const double from = mesh_place(at, far, axis) - 0.5 * TAPS, first = floor(from) + 1;
            const float rest = static_cast<float>(from + 1 - first);
            place[axis] = wrapped(static_cast<long long>(first), far.shape[axis]);
#pragma unroll
            for (int t = 0; t < TAPS; ++t) {
                float value = 0;
#pragma unroll
                for (int k = COEFFICIENTS<TAPS> - 1; k >= 0; --k)
                    value = fmaf(value, rest, pieces[t * COEFFICIENTS<TAPS> + k]);
                weight[axis][t] = value;
            }
        }
        float sum = 0;
        int i = place[0];
#pragma unroll 1
        for (int a = 0; a < TAPS; ++a) {
            float part = 0, mine = 0;
#pragma unroll
            for (int t = 0; t < TAPS; ++t) mine = t == a ? weight[0][t] : mine;
            int j = place[1];
#pragma unroll
            for (int b = 0; b < TAPS; ++b) {
                const float* const row = mesh + (i * static_cast<long long>(far.shape[1]) + j) * far.shape[2];
                float line = 0;
                int k = place[2];
#pragma unroll
                for (int c = 0; c < TAPS; ++c) {
                    line = fmaf(weight[2][c], __ldg(row + k), line);
                    if (++k == far.shape[2]) k = 0;
                }
                part = fmaf(weight[1][b], line, part);
                if (++j == far.shape[1]) j = 0;
            }
            sum = fmaf(mine, part, sum);
            if (++i == far.shape[0]) i = 0;
        }
        sum += static_cast<float>(grid.ramp[0] + grid.ramp[1] * px + grid.ramp[2] * py + grid.ramp[3] * pz);
        map[(x * static_cast<long long>(grid.shape[1]) + y) * grid.shape[2] + z] += sum;
    }
}
