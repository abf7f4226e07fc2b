// Quadratic Bezier curves as polylines, with as many segments as their curvature needs; the contract is in
// kernels/classic/tessellation/__init__.py.
//
// Curves are float32 [n, 3, 2], points float32 [total, 2]; offsets int64 [n + 1] are the starts of the curves' points. The
// number of points is known only on the device. A kernel that launches a grid for each curve (dynamic parallelism) pays a
// launch for a few dozen points; two passes (count, prefix sum, fill) pay one more read of the curves.
//
// Floors for n curves with p points in total on a device that copies B bytes a second: (24 n + 8 p) / B to fill, 24 n + 8 n
// more to count, 16 n for the prefix sum.
//
// Kernels, naive to fast:
//   fill_fixed     one block per curve, in an array with room for the maximum; pack removes the gaps
//   fill_threads   one thread per curve, at its offset: nothing is moved twice, but writes are scattered
//   fill_warps     one warp per curve: coalesced writes; lanes idle at the end, and short curves use few
//   fill_balanced  2048 points of the result per block, of any curves; marks locate the curves' first points
// Built with --fmad=false, so the points have the same bits as on the CPU.
// Source: the flatness of quadratic curves, e.g. Sederberg, "Computer aided geometric design", ch. 10 (2012).

#include "block_scan.cuh"

constexpr int THREADS = 256;
constexpr int FIXED_THREADS = 32;
constexpr int FILLED = 2048;  // points of a block of fill_balanced

struct Curve {
    float2 a, b, c;
};

// With n equal steps of its parameter a curve deviates by |a - 2b + c| / (4 n^2) from its chords. A NaN gives the maximum
// number of segments.
__device__ inline int segments_of(const Curve& curve, double per_tolerance, int most) {
    const double x = (static_cast<double>(curve.a.x) - 2.0 * curve.b.x) + curve.c.x;
    const double y = (static_cast<double>(curve.a.y) - 2.0 * curve.b.y) + curve.c.y;
    const double root = sqrt(sqrt(x * x + y * y) * per_tolerance);  // per_tolerance: 1 / (4 tolerance)
    return root < most ? max(1, static_cast<int>(ceil(root))) : most;
}

__device__ inline float2 point_of(const Curve& curve, int i, int segments) {
    const float t = static_cast<float>(i) / static_cast<float>(segments), s = 1.0f - t;
    const float of_a = s * s, of_b = 2.0f * s * t, of_c = t * t;
    return make_float2((of_a * curve.a.x + of_b * curve.b.x) + of_c * curve.c.x,
                       (of_a * curve.a.y + of_b * curve.b.y) + of_c * curve.c.y);
}

// The first pass: the number of points of each curve, one more than its segments. counts[-1] becomes 0, for the sums.
__global__ void __launch_bounds__(THREADS)
    count_points(const Curve* __restrict__ curves, long long count, double per_tolerance, int most, long long* counts) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i == 0) counts[-1] = 0;
    if (i < count) counts[i] = segments_of(curves[i], per_tolerance, most) + 1;
}

// fill_fixed: one pass without offsets, but each curve takes space for the maximum number of points, and a copy later.
__global__ void __launch_bounds__(FIXED_THREADS)
    fill_fixed(const Curve* __restrict__ curves, double per_tolerance, int most, float2* slots, long long* counts) {
    const long long curve = blockIdx.x;
    const int segments = segments_of(curves[curve], per_tolerance, most);
    for (int i = threadIdx.x; i <= segments; i += FIXED_THREADS)
        slots[curve * (most + 1) + i] = point_of(curves[curve], i, segments);
    if (threadIdx.x == 0) counts[curve] = segments + 1;
    if (curve == 0 && threadIdx.x == 0) counts[-1] = 0;
}

__global__ void __launch_bounds__(FIXED_THREADS)
    pack(const float2* __restrict__ slots, const long long* __restrict__ offsets, int most, float2* points) {
    const long long curve = blockIdx.x, begin = offsets[curve];
    const int count = static_cast<int>(offsets[curve + 1] - begin);
    for (int i = threadIdx.x; i < count; i += FIXED_THREADS) points[begin + i] = slots[curve * (most + 1) + i];
}

// fill_threads: the second pass of two, one thread per curve.
__global__ void __launch_bounds__(THREADS) fill_threads(const Curve* __restrict__ curves, long long count,
                                                        const long long* __restrict__ offsets, float2* points) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const Curve curve = curves[i];
    const long long begin = offsets[i];
    const int segments = static_cast<int>(offsets[i + 1] - begin) - 1;
    for (int k = 0; k <= segments; ++k) points[begin + k] = point_of(curve, k, segments);
}

// fill_warps: one warp per curve, whose lanes write neighbours.
__global__ void __launch_bounds__(THREADS) fill_warps(const Curve* __restrict__ curves, long long count,
                                                      const long long* __restrict__ offsets, float2* points) {
    const long long i = (blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x) / 32;
    if (i >= count) return;
    const Curve curve = curves[i];
    const long long begin = offsets[i];
    const int segments = static_cast<int>(offsets[i + 1] - begin) - 1;
    for (int k = threadIdx.x % 32; k <= segments; k += 32) points[begin + k] = point_of(curve, k, segments);
}

// A running maximum of the marks, EACH consecutive ones per thread.
template <int EACH>
__device__ inline void fill_forward(unsigned short* marks, int* warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int mine[EACH], greatest = 0;
    for (int k = 0; k < EACH; ++k) mine[k] = greatest = max(greatest, static_cast<int>(marks[threadIdx.x * EACH + k]));
    int before = greatest;  // of the warp's threads up to and with this one
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(WHOLE_WARP, before, step);
        if (lane >= step) before = max(before, other);
    }
    if (lane == 31) warps[warp] = before;
    before = __shfl_up_sync(WHOLE_WARP, before, 1);
    if (lane == 0) before = 0;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before = max(before, warps[w]);
    for (int k = 0; k < EACH; ++k) marks[threadIdx.x * EACH + k] = static_cast<unsigned short>(max(before, mine[k]));
    __syncthreads();
}

// The curve of the first point of each tile of FILLED points: each curve writes the tiles that begin in it.
__global__ void __launch_bounds__(THREADS)
    find_first_curves(const long long* __restrict__ offsets, long long count, int* first_curves) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    const long long end = (offsets[i + 1] + FILLED - 1) / FILLED;
    for (long long tile = (offsets[i] + FILLED - 1) / FILLED; tile < end; ++tile) first_curves[tile] = static_cast<int>(i);
}

// fill_balanced: every thread writes the same number of points, coalesced, for any lengths of curves. The block's curves are
// in shared memory, which suffices because a curve has at least two points. Each marks its first point; the largest mark at
// or before a point is its curve.
__global__ void __launch_bounds__(THREADS)
    fill_balanced(const Curve* __restrict__ curves, long long count, const long long* __restrict__ offsets,
                  const int* __restrict__ first_curves, float2* points) {
    constexpr int EACH = FILLED / THREADS;
    __shared__ Curve staged[FILLED / 2 + 2];
    __shared__ int begins[FILLED / 2 + 3];
    __shared__ unsigned short owners[FILLED];
    __shared__ int warps[THREADS / 32];
    const long long first = blockIdx.x * static_cast<long long>(FILLED), total = offsets[count];
    const int held = static_cast<int>(min(total - first, static_cast<long long>(FILLED)));
    const long long first_curve = first_curves[blockIdx.x];
    const long long last_curve = first + FILLED < total ? first_curves[blockIdx.x + 1] : count - 1;
    const int here = static_cast<int>(last_curve - first_curve) + 1;
    for (int i = threadIdx.x; i < FILLED; i += THREADS) owners[i] = 0;
    __syncthreads();
    for (int k = threadIdx.x; k <= here; k += THREADS) {
        const int begin = static_cast<int>(offsets[first_curve + k] - first);  // of the first, at or below 0
        begins[k] = begin;
        if (k < here) staged[k] = curves[first_curve + k];
        if (begin >= 0 && begin < FILLED) owners[begin] = static_cast<unsigned short>(k);
    }
    __syncthreads();
    fill_forward<EACH>(owners, warps);
    for (int i = threadIdx.x; i < held; i += THREADS) {
        const int k = owners[i], begin = begins[k];
        points[first + i] = point_of(staged[k], i - begin, begins[k + 1] - begin - 1);
    }
}
