// The first step of the classic ladder: one thread per result, every tap from global memory. No thread waits for another. Part
// of smoothing.cu, which defines Axis and Weights.
#pragma once

// W(taps) at `first` by the contract's doubling tree, walked depth first: two halves merge as carries of a counter do.
template <typename Sum, typename In>
__device__ inline Sum window_sum(const In* line, long long first, const Axis& axis, Sum fill) {
    Sum pending[8];  // up to 255 taps
    const int depth = 31 - __clz(axis.taps);
    for (int leaf = 0;; ++leaf) {
        long long start = first;
        for (int level = 0; level < depth; ++level)
            if (leaf >> level & 1) start += axis.taps >> (depth - level);
        Sum sum = tap<Sum>(line, start, axis, fill);
        int level = 0;
        for (; level < depth && (leaf >> level & 1); ++level) {
            const int half = axis.taps >> (depth - level), whole = axis.taps >> (depth - level - 1);
            start -= half;
            sum = pending[level] + sum;
            if (whole & 1) sum = sum + tap<Sum>(line, start + 2 * half, axis, fill);
        }
        if (level == depth) return sum;
        pending[level] = sum;
    }
}

// box_gather: the definition, one axis per pass. Every tap is a load, so each sample is loaded `taps` times.
template <typename In, typename Sum, typename Out>
__global__ void __launch_bounds__(THREADS)
box_gather(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Sum fill, Sum divisor) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < total; i += gridDim.x * (long long)THREADS) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.out_length * axis.length * axis.inner + column;
        const Sum sum = window_sum(line, row % axis.out_length + first_tap(axis), axis, fill);
        if constexpr (same<Sum, Out> && !same<Sum, float> && !same<Sum, double>) out[i] = sum;
        else out[i] = to_mean<Out>(sum, divisor);
    }
}

// gauss_gather: the same for Gaussians.
template <typename In, typename Work, typename Out>
__global__ void __launch_bounds__(THREADS)
gauss_gather(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Work fill, Weights<Work> weights) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < total; i += gridDim.x * (long long)THREADS) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.out_length * axis.length * axis.inner + column;
        const long long centre = row % axis.out_length + first_tap(axis) + axis.before;
        Work sum = weights.half[0] * weighed_tap(line, centre, axis, fill);
        for (int k = 1; k <= axis.before; ++k) {
            const Work pair = weighed_tap(line, centre - k, axis, fill) + weighed_tap(line, centre + k, axis, fill);
            sum = fma_rn(weights.half[k], pair, sum);
        }
        out[i] = to_sample<Out>(sum);
    }
}

// An array seen as [between, length 0, between, length 1, between, length 2, inner], up to three axes filtered.
struct Axes {
    Axis axis[3];  // `inner` is the stride of that axis in the input
    long long between[3];
    long long inner, total;
};

// box_direct: the whole window at once. Saves the intermediate arrays of box_gather, but loads the product of the sizes.
template <typename Sample>
__global__ void __launch_bounds__(THREADS)
box_direct(const Sample* __restrict__ in, Sample* __restrict__ out, Axes axes, int fill, unsigned long long divisor) {
    typedef unsigned long long Sum;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < axes.total;
         i += gridDim.x * (long long)THREADS) {
        long long rest = i / axes.inner, base = i % axes.inner, first[3];
        for (int d = 2; d >= 0; --d) {
            const Axis& axis = axes.axis[d];
            first[d] = rest % axis.out_length + first_tap(axis);
            rest /= axis.out_length;
            base += rest % axes.between[d] * axis.length * axis.inner;
            rest /= axes.between[d];
        }
        Sum sum = 0;
        for (int a = 0; a < axes.axis[0].taps; ++a)
            for (int b = 0; b < axes.axis[1].taps; ++b)
                for (int c = 0; c < axes.axis[2].taps; ++c) {
                    const long long p = border_index(first[0] + a, axes.axis[0].length, axes.axis[0].mode);
                    const long long q = border_index(first[1] + b, axes.axis[1].length, axes.axis[1].mode);
                    const long long r = border_index(first[2] + c, axes.axis[2].length, axes.axis[2].mode);
                    const long long from = p * axes.axis[0].inner + q * axes.axis[1].inner + r * axes.axis[2].inner;
                    sum += to_sum<Sum>(p < 0 || q < 0 || r < 0 ? static_cast<Sample>(fill) : in[base + from]);
                }
        out[i] = to_mean<Sample>(sum, divisor);
    }
}
