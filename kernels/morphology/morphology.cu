// The difference of two images that ends a top-hat: kernels/morphology/__init__.py. Minima and maxima are those of rank.cu.
// No thread waits for another.
//
// Floor of N samples of b bytes on a device with bandwidth B: 3 N b / B, two reads and a write.

#include "samples.cuh"

constexpr int THREADS = 256;

template <typename Sample>
struct Ends {
    static constexpr int LOW = same<Sample, short> ? -32768 : 0;
    static constexpr int HIGH = same<Sample, short> ? 32767 : sizeof(Sample) == 1 ? 255 : 65535;
};

// Integers saturate; a sample that is missing in either image is missing. `out` may be one of them.
template <typename Sample>
__global__ void __launch_bounds__(THREADS) saturated_difference(
    const Sample* image, const Sample* subtracted, Sample* out, long long count, Sample nodata, int has_nodata) {
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < count; i += gridDim.x * (long long)THREADS) {
        const Sample a = image[i], b = subtracted[i];
        Sample found;
        if constexpr (same<Sample, float> || same<Sample, double>) {
            found = a - b;
        } else {
            const int apart = static_cast<int>(a) - static_cast<int>(b);
            found = static_cast<Sample>(min(max(apart, Ends<Sample>::LOW), Ends<Sample>::HIGH));
        }
        out[i] = has_nodata && (a == nodata || b == nodata) ? nodata : found;
    }
}
