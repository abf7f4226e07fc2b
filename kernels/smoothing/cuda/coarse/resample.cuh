// The passes of a decimated Gaussian along one axis, to the bit as in kernels/smoothing/decimated.py. A sum a thread, which
// waits for no other. Part of smoothing.cu.
#pragma once

#include "borders.cuh"
#include "samples.cuh"

constexpr int MOST_DOWN = 48;  // weights: at most 47
constexpr int MOST_UP = 48;    // weights: at most 8 phases of 6

// One axis of an array seen as [outer, length, inner]; the result is [outer, count, inner].
struct Resample {
    long long outer, length, inner, count;
    long long first;  // position of the first tap of sample 0 (decimate); position of sample 0 in phases (interpolate)
    int factor, taps, mode;
};

template <typename Work>
struct Splines {
    Work weight[MOST_UP];
};

// decimate: a thread sums the taps of one coarse sample; neighbouring threads have neighbouring samples of `inner`.
template <typename In, typename Work>
__global__ void __launch_bounds__(256)
decimate(const In* __restrict__ in, Work* __restrict__ out, const Work* __restrict__ weight, Resample axis, Work fill) {
    const long long total = axis.outer * axis.count * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.count * axis.length * axis.inner + column;
        const long long first = axis.first + row % axis.count * axis.factor;
        const bool inside = first >= 0 && first + axis.taps <= axis.length;
        const auto tap = [&](int k) {
            const long long from = inside ? first + k : border_index(first + k, axis.length, axis.mode);
            return from < 0 ? fill : static_cast<Work>(line[from * axis.inner]);
        };
        Work sum = weight[0] * tap(0);
        for (int k = 1; k < axis.taps; ++k) sum = fma_rn(weight[k], tap(k), sum);
        out[i] = sum;
    }
}

// interpolate: a thread sums the taps of one sample.
template <typename Work, typename Out>
__global__ void __launch_bounds__(256)
interpolate(const Work* __restrict__ in, Out* __restrict__ out, Resample axis, Splines<Work> spline) {
    const long long total = axis.outer * axis.count * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const long long position = axis.first + row % axis.count;
        const Work* weight = spline.weight + position % axis.factor * axis.taps;
        const Work* line = in + (row / axis.count * axis.length + position / axis.factor) * axis.inner + column;
        Work sum = weight[0] * line[0];
        for (int k = 1; k < axis.taps; ++k) sum = fma_rn(weight[k], line[k * axis.inner], sum);
        out[i] = to_sample<Out>(sum);
    }
}
