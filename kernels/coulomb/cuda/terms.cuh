// One atom's term at one point. Lengths are in units of the cutoff ("direct": in angstrom).
#pragma once

enum Scheme { SHIFT, TAYLOR2, TRUNCATE, SPLIT, DIRECT };

constexpr int SPLIT_TERMS = 8;  // in geometry.py too

// One instruction of the special-function unit, relative error below 2^-22. The CUDA library's also handles denormals,
// which softened distances never are.
__device__ inline float inverse_root(float x) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// a * a + b clamped to 0 … 1, at the cost of a multiply-add.
__device__ inline float saturated_square(float a, float b) {
    float sum;
    asm("fma.rn.sat.f32 %0, %1, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

// The charge in the form add_term takes: for "shift" the signed square root.
template <typename Real>
__device__ inline float prepared_charge(Real charge, int scheme) {
    if (scheme != SHIFT) return static_cast<float>(charge);
    return static_cast<float>(charge < 0 ? -sqrt(-static_cast<double>(charge)) : sqrt(static_cast<double>(charge)));
}

// sum += charge f(r), r² = along² + across. Beyond the cutoff exactly zero is added: r² is clamped to one, where "shift"
// "taylor2" and "split" vanish. With c the signed root of the charge, (c - c r²)|c - c r²| is q (1 - r²)² in two instructions.
template <int SCHEME, bool BY_DISTANCE>
__device__ inline void add_term(float& sum, float along, float across, float charge,
                                const float (&split)[SPLIT_TERMS]) {
    if constexpr (SCHEME == SHIFT) {
        const float square = saturated_square(along, across);
        float root = inverse_root(square);
        if constexpr (BY_DISTANCE) root *= root;
        const float rest = fmaf(-charge, square, charge);
        sum = fmaf(rest * fabsf(rest), root, sum);
    } else if constexpr (SCHEME == TAYLOR2) {
        const float square = saturated_square(along, across);
        const float root = inverse_root(square);
        float term = root - fmaf(square, fmaf(square, 0.375f, -1.25f), 1.875f);
        if constexpr (BY_DISTANCE) term *= root;
        sum = fmaf(charge, term, sum);
    } else if constexpr (SCHEME == SPLIT) {
        const float square = saturated_square(along, across), rest = 1.0f - square;
        float series = split[SPLIT_TERMS - 1];
#pragma unroll
        for (int k = SPLIT_TERMS - 2; k >= 0; --k) series = fmaf(series, rest, split[k]);
        sum = fmaf(charge, inverse_root(square) - series, sum);
    } else {
        const float square = fmaf(along, along, across);
        float root = inverse_root(square);
        if constexpr (BY_DISTANCE) root *= root;
        if (SCHEME == DIRECT || square <= 1.0f) sum = fmaf(charge, root, sum);
    }
}
