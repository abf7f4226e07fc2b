// Discrete Fourier transforms of a few values in registers, in order; the steps of the FFTs of lines.
#pragma once

__device__ inline float2 turned(float2 a, float2 b) { return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
__device__ inline float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ inline float2 minus(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }

template <bool INVERSE>
__device__ inline float2 quarter_turn(float2 a) {  // times -i, or i
    return INVERSE ? make_float2(-a.y, a.x) : make_float2(a.y, -a.x);
}

__device__ inline void transform2(float2& a, float2& b) {
    const float2 sum = plus(a, b);
    b = minus(a, b);
    a = sum;
}

template <bool INVERSE>
__device__ inline void transform4(float2& a, float2& b, float2& c, float2& d) {
    transform2(a, c);
    transform2(b, d);
    d = quarter_turn<INVERSE>(d);
    transform2(a, b);
    transform2(c, d);
    const float2 second = c;  // outputs in order: a, c, b, d
    c = b;
    b = second;
}

template <bool INVERSE>
__device__ inline void transform8(float2 (&v)[8]) {
    constexpr float HALF = 0.70710678118654752f;
    transform4<INVERSE>(v[0], v[2], v[4], v[6]);
    transform4<INVERSE>(v[1], v[3], v[5], v[7]);
    v[3] = turned(v[3], make_float2(HALF, INVERSE ? HALF : -HALF));
    v[5] = quarter_turn<INVERSE>(v[5]);
    v[7] = turned(v[7], make_float2(-HALF, INVERSE ? HALF : -HALF));
    const float2 even[4] = {v[0], v[2], v[4], v[6]}, odd[4] = {v[1], v[3], v[5], v[7]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = plus(even[i], odd[i]);
        v[i + 4] = minus(even[i], odd[i]);
    }
}

// Of an odd number of values: pairs k and R − k share their products.
template <bool INVERSE, int R>
__device__ inline void transform_odd(float2 (&v)[R]) {
    static_assert(R == 3 || R == 5 || R == 7 || R == 9);
    constexpr float COSINES[4][4] = {{-0.5f},
                                     {0.30901699437494742f, -0.80901699437494742f},
                                     {0.62348980185873353f, -0.22252093395631440f, -0.90096886790241913f},
                                     {0.76604444311897804f, 0.17364817766693035f, -0.5f, -0.93969262078590838f}};
    constexpr float SINES[4][4] = {{0.86602540378443865f},
                                   {0.95105651629515357f, 0.58778525229247313f},
                                   {0.78183148246802981f, 0.97492791218182361f, 0.43388373911755812f},
                                   {0.64278760968653933f, 0.98480775301220806f, 0.86602540378443865f, 0.34202014332566873f}};
    constexpr int HALF = R / 2, OF = HALF - 1;
    float2 sums[HALF], turns[HALF];
    float2 total = v[0];
#pragma unroll
    for (int k = 0; k < HALF; ++k) {
        sums[k] = plus(v[k + 1], v[R - 1 - k]);
        turns[k] = quarter_turn<INVERSE>(minus(v[k + 1], v[R - 1 - k]));
        total = plus(total, sums[k]);
    }
    const float2 first = v[0];
    v[0] = total;
#pragma unroll
    for (int m = 1; m <= HALF; ++m) {
        float2 even = first, odd = make_float2(0, 0);
#pragma unroll
        for (int k = 1; k <= HALF; ++k) {
            const int step = m * k % R, place = step == 0 ? 0 : step <= HALF ? step - 1 : R - step - 1;
            const float cosine = step == 0 ? 1.f : COSINES[OF][place];
            const float sine = step == 0 ? 0.f : step <= HALF ? SINES[OF][place] : -SINES[OF][place];
            even = make_float2(even.x + cosine * sums[k - 1].x, even.y + cosine * sums[k - 1].y);
            odd = make_float2(odd.x + sine * turns[k - 1].x, odd.y + sine * turns[k - 1].y);
        }
        v[m] = plus(even, odd);
        v[R - m] = minus(even, odd);
    }
}

template <bool INVERSE, int R>
__device__ inline void transform_in_registers(float2 (&v)[R]) {
    if constexpr (R == 4) transform4<INVERSE>(v[0], v[1], v[2], v[3]);
    else if constexpr (R == 8) transform8<INVERSE>(v);
    else transform_odd<INVERSE, R>(v);
}

// Index of a line's value in shared memory; a gap after every eight values avoids bank conflicts.
template <int STEP>
__device__ inline int shared_place(int position) { return (position + position / 8) * STEP; }
