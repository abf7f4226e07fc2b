// Windows of more than 255 taps, one axis per pass. A result a thread, which waits for no other. Part of smoothing.cu, which
// defines Axis.
#pragma once

#include "borders.cuh"
#include "samples.cuh"

// box_extend: the samples that all windows see, as sums of one sample.
template <typename In, typename Sum>
__global__ void __launch_bounds__(256)
box_extend(const In* __restrict__ in, Sum* __restrict__ out, Axis axis, Sum fill) {
    const long long count = axis.out_length + axis.taps - 1, total = axis.outer * count * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const long long at = row % count - (axis.mode == VALID ? 0 : axis.before);
        const long long from = border_index(at, axis.length, axis.mode);
        const In* line = in + row / count * axis.length * axis.inner + column;
        if constexpr (same<In, Sum>) out[i] = from < 0 ? fill : line[from * axis.inner];
        else out[i] = from < 0 ? fill : to_sum<Sum>(line[from * axis.inner]);
    }
}

// box_double: W(2m)[i] = W(m)[i] + W(m)[i + m], plus x[i + 2m] if `odd`, as the contract builds windows: log2(taps) of these
// passes, each at the speed of memory. Lines have `length` samples in all arrays; those past the last window are not used.
template <typename Sum>
__global__ void __launch_bounds__(256)
box_double(const Sum* __restrict__ windows, const Sum* __restrict__ samples, Sum* __restrict__ out, long long total,
           long long reach, int odd) {
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        Sum sum = windows[i] + (i + reach < total ? windows[i + reach] : Sum(0));
        if (odd) sum = sum + (i + 2 * reach < total ? samples[i + 2 * reach] : Sum(0));
        out[i] = sum;
    }
}

// box_finish: the windows' sums as sums or means, without those past the last window.
template <typename Sum, typename Out>
__global__ void __launch_bounds__(256)
box_finish(const Sum* __restrict__ windows, Out* __restrict__ out, Axis axis, Sum divisor) {
    const long long row_samples = axis.out_length * axis.inner, pitch = (axis.out_length + axis.taps - 1) * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < axis.outer * row_samples; i += gridDim.x * 256LL) {
        const Sum sum = windows[i / row_samples * pitch + i % row_samples];
        if constexpr (same<Sum, Out> && !same<Sum, float> && !same<Sum, double>) out[i] = sum;
        else out[i] = to_mean<Out>(sum, divisor);
    }
}

// gauss_far: a thread sums the taps of one sample.
template <typename In, typename Work, typename Out>
__global__ void __launch_bounds__(256)
gauss_far(const In* __restrict__ in, Out* __restrict__ out, const Work* __restrict__ half, Axis axis, Work fill) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.out_length * axis.length * axis.inner + column;
        const long long centre = row % axis.out_length + (axis.mode == VALID ? axis.before : 0);
        const auto tap = [&](long long at) {
            const long long from = border_index(at, axis.length, axis.mode);
            return from < 0 ? fill : static_cast<Work>(line[from * axis.inner]);
        };
        Work sum = half[0] * tap(centre);
        for (int k = 1; k <= axis.before; ++k) sum = fma_rn(half[k], tap(centre - k) + tap(centre + k), sum);
        out[i] = to_sample<Out>(sum);
    }
}
