// What becomes of a Gaussian's sums between its axes, and in the end (kernels/smoothing/axis_rounding.py). Part of smoothing.cu.
#pragma once

// `up` is so large that floats of its size are quarters, or whole numbers, apart: adding it rounds, ties to even. -0 and 0
// leave a sum as it is.
template <typename Work>
struct Settling {
    Work up, down;
};

template <typename Work>
__device__ inline Work settled(Work sum, const Settling<Work>& settling) {
    return (sum + settling.up) - settling.down;
}
