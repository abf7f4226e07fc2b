// How a Gaussian's sums are rounded between axes and at the end (kernels/smoothing/axis_rounding.py). Part of smoothing.cu.
#pragma once

// `up` is so large that floats of its size are quarters, or whole numbers, apart: adding it rounds, ties to even. -0 and 0
// leave a sum as it is.
template <typename Work>
struct AxisRounding {
    Work up, down;
};

template <typename Work>
__device__ inline Work rounded(Work sum, const AxisRounding<Work>& rounding) {
    return (sum + rounding.up) - rounding.down;
}
