// One step of an orthonormal wavelet transform along one axis, periodic and decimated.
//
// Contract: complex64 [batch][full 0][full 1][full 2]; the region [size 0][size 1][size 2] at the origin of each image is
// read from `source` and written to `made`, which is another array. Along `axis`, of n samples in h = n / 2 pairs:
//   analyse      made[k] = Σ_j low[j] s[(2k + j) % 2h],  made[n − h + k] = Σ_j high[j] s[(2k + j) % 2h]
//   synthesise   its transpose. An odd line's last sample is copied to, or from, place h.
// `shift` (three ints on the device, or the last `shifted` of them; null: none) rotates what analyse reads and what
// synthesise writes; the region is then the whole image. analyse shrinks finished values by *threshold (null: none):
// all of the region at the coarsest level, else those outside the approximation of sizes `half`.
//
// Floors on an H200, 256², db2: a pass reads and writes 1 MiB, 0.25 µs; 16 complex multiply-adds a pair, 0.05 µs. A launch
// in a graph takes 2 µs, so launches are the limit for images, and each begins while the last one ends; passes of volumes
// are bound by memory.
// Source: Mallat, IEEE Trans. Pattern Anal. 11 (1989).

#include "pdl.cuh"

struct Pass {
    int batch;
    int size[3], full[3], half[3];
    int axis, shifted, coarsest;
};

struct Filter {
    float low[8], high[8];  // the first TAPS of each
};

constexpr int THREADS = 256;

// The offset of (x, y, z) of an image, rotated by the shift.
__device__ inline long long place(const int (&at)[3], const Pass& pass, const int* shift) {
    long long offset = 0;
    for (int axis = 0; axis < 3; axis++) {
        int i = at[axis];
        const int own = axis - (3 - pass.shifted);
        if (shift && own >= 0) {
            const int n = pass.full[axis];
            i = (i + shift[own] % n + n) % n;
        }
        offset = offset * pass.full[axis] + i;
    }
    return offset;
}

// The pair of this thread: its image and its place, the pair's number along the axis. False beyond the last.
__device__ inline bool pair_of(const Pass& pass, int (&at)[3], long long& image) {
    long long left = (long long)blockIdx.x * THREADS + threadIdx.x;
    for (int axis = 2; axis >= 0; axis--) {
        const int n = axis == pass.axis ? (pass.size[axis] + 1) / 2 : pass.size[axis];
        at[axis] = int(left % n);
        left /= n;
    }
    image = left * pass.full[0] * pass.full[1] * pass.full[2];
    return left < pass.batch;
}

__device__ inline float2 shrunk(float2 value, float by) {
    const float size = sqrtf(value.x * value.x + value.y * value.y);
    const float factor = size > by ? (size - by) / size : size <= by ? 0.0f : size;
    return make_float2(value.x * factor, value.y * factor);
}

template <int TAPS>
__global__ void __launch_bounds__(THREADS) analyse(
    const float2* __restrict__ source, float2* __restrict__ made, Filter filter, const int* shift,
    const float* threshold, Pass pass) {
    grid_dependency_synchronize();
    int at[3];
    long long image;
    if (!pair_of(pass, at, image)) return;
    const int n = pass.size[pass.axis], pairs = n / 2, k = at[pass.axis];
    float2 smooth = make_float2(0, 0), detail = make_float2(0, 0);
    const bool alone = k == pairs;
    if (alone) {
        at[pass.axis] = n - 1;
        smooth = source[image + place(at, pass, shift)];
    } else {
#pragma unroll
        for (int j = 0; j < TAPS; j++) {
            at[pass.axis] = (2 * k + j) % (2 * pairs);
            const float2 value = source[image + place(at, pass, shift)];
            smooth.x += filter.low[j] * value.x, smooth.y += filter.low[j] * value.y;
            detail.x += filter.high[j] * value.x, detail.y += filter.high[j] * value.y;
        }
    }
    at[pass.axis] = k;
    if (threshold) {
        const float by = *threshold;
        const bool inside = at[0] < pass.half[0] && at[1] < pass.half[1] && at[2] < pass.half[2];
        if (pass.coarsest || !inside) smooth = shrunk(smooth, by);
        detail = shrunk(detail, by);
    }
    made[image + place(at, pass, nullptr)] = smooth;
    if (alone) return;
    at[pass.axis] = n - pairs + k;
    made[image + place(at, pass, nullptr)] = detail;
}

template <int TAPS>
__global__ void __launch_bounds__(THREADS) synthesise(
    const float2* __restrict__ source, float2* __restrict__ made, Filter filter, const int* shift, Pass pass) {
    grid_dependency_synchronize();
    int at[3];
    long long image;
    if (!pair_of(pass, at, image)) return;
    const int n = pass.size[pass.axis], pairs = n / 2, k = at[pass.axis];
    if (k == pairs) {
        const float2 value = source[image + place(at, pass, nullptr)];
        at[pass.axis] = n - 1;
        made[image + place(at, pass, shift)] = value;
        return;
    }
    float2 first = make_float2(0, 0), second = make_float2(0, 0);
#pragma unroll
    for (int j = 0; j < TAPS; j += 2) {
        const int from = ((k - j / 2) % pairs + pairs) % pairs;
        at[pass.axis] = from;
        const float2 smooth = source[image + place(at, pass, nullptr)];
        at[pass.axis] = n - pairs + from;
        const float2 detail = source[image + place(at, pass, nullptr)];
        first.x += filter.low[j] * smooth.x + filter.high[j] * detail.x;
        first.y += filter.low[j] * smooth.y + filter.high[j] * detail.y;
        second.x += filter.low[j + 1] * smooth.x + filter.high[j + 1] * detail.x;
        second.y += filter.low[j + 1] * smooth.y + filter.high[j + 1] * detail.y;
    }
    at[pass.axis] = 2 * k;
    made[image + place(at, pass, shift)] = first;
    at[pass.axis] = 2 * k + 1;
    made[image + place(at, pass, shift)] = second;
}
