// How a Gaussian's sums are rounded between axes and at the end (kernels/smoothing/axis_rounding.py). Part of smoothing.cu.
#pragma once

// `up` is so large that neighbouring floats differ by a quarter, or by one: adding it rounds, ties to even. With -0 and 0,
// sums are not rounded.
template <typename Work>
struct AxisRounding {
    Work up, down;
};

template <typename Work>
__device__ inline Work rounded(Work sum, const AxisRounding<Work>& rounding) {
    return (sum + rounding.up) - rounding.down;
}
