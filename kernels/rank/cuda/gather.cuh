// One result a thread, for any window, dtype and border. No thread waits for another. Part of rank.cu.
#pragma once

#include "keys.cuh"
#include "borders.cuh"

constexpr int THREADS = 256;
constexpr int MAX_SIDE = 31;  // of a footprint that is not a box

struct RankAxis {
    long long length, out_length;
    int first, taps, mode, unused;
};

// The rank among n samples: a percentile, or if that is negative, `rank` of `whole` (see kernels/rank/task.py).
struct RankOf {
    double percentile;
    long long rank, whole;
    __device__ long long of(long long n) const {
        long long found = n - 1;
        if (percentile < 0.0 && rank != whole - 1) found = rank * n / whole;
        else if (percentile >= 0.0 && percentile != 100.0) found = static_cast<long long>(n * percentile / 100.0);
        return max(min(found, n - 1), 0ll);
    }
};

struct RankTask {
    RankAxis axis[3];
    long long planes, inner, total;  // total: results
    RankOf rank;
    int omit_nan, has_nodata;
};

// Planes of an image whose windows lie along rows and columns.
struct PlanesTask {
    int rows, columns, out_rows, out_columns, first_y, first_x, mode_y, mode_x;
};

// Bit x of row z * taps of axis 1 + y: whether the sample counts.
struct Footprint {
    unsigned row[MAX_SIDE * MAX_SIDE];
};

// The sample at these positions of the input.
template <typename Sample>
__device__ inline Sample sample_at(
    const Sample* in, const RankTask& task, long long plane, long long z, long long y, long long x, long long within,
    Sample cval) {
    z = border_index(z, task.axis[0].length, task.axis[0].mode);
    y = border_index(y, task.axis[1].length, task.axis[1].mode);
    x = border_index(x, task.axis[2].length, task.axis[2].mode);
    if (z < 0 || y < 0 || x < 0) return cval;
    return in[(((plane * task.axis[0].length + z) * task.axis[1].length + y) * task.axis[2].length + x) * task.inner + within];
}

// Calls body(sample) for every sample of the window of a result that counts.
template <bool SHAPED, typename Sample, typename Body>
__device__ inline void for_window(
    const Sample* in, const RankTask& task, const Footprint& footprint, long long result, Sample cval, Body body) {
    const long long within = result % task.inner;
    result /= task.inner;
    const long long x0 = result % task.axis[2].out_length + task.axis[2].first;
    result /= task.axis[2].out_length;
    const long long y0 = result % task.axis[1].out_length + task.axis[1].first;
    result /= task.axis[1].out_length;
    const long long z0 = result % task.axis[0].out_length + task.axis[0].first;
    const long long plane = result / task.axis[0].out_length;
    for (int z = 0; z < task.axis[0].taps; ++z)
        for (int y = 0; y < task.axis[1].taps; ++y)
            for (int x = 0; x < task.axis[2].taps; ++x) {
                if constexpr (SHAPED)
                    if (!(footprint.row[z * task.axis[1].taps + y] >> x & 1)) continue;
                body(sample_at(in, task, plane, z0 + z, y0 + y, x0 + x, within, cval));
            }
}

// The result of one window, by bisection of the keys.
template <bool SHAPED, typename Sample>
__device__ inline Sample ranked(
    const Sample* in, const RankTask& task, const Footprint& footprint, long long result, Sample cval, Sample nodata,
    Sample empty) {
    using Key = KeyOf<Sample>;
    long long present = 0, nans = 0;
    Key lowest = ~Key(0), highest = 0;
    for_window<SHAPED>(in, task, footprint, result, cval, [&](Sample sample) {
        if (is_nan(sample)) {
            ++nans;
        } else if (!task.has_nodata || sample != nodata) {
            ++present;
            lowest = min(lowest, key_of(sample));
            highest = max(highest, key_of(sample));
        }
    });
    if (nans > 0 && !task.omit_nan) return not_a_number<Sample>();
    if (present == 0) return empty;
    const long long rank = task.rank.of(present);
    if (rank == 0) return sample_of<Sample>(lowest);
    if (rank == present - 1) return sample_of<Sample>(highest);
    while (lowest < highest) {
        const Key middle = lowest + (highest - lowest) / 2;
        long long below = 0;
        for_window<SHAPED>(in, task, footprint, result, cval, [&](Sample sample) {
            if (!is_nan(sample) && (!task.has_nodata || sample != nodata)) below += key_of(sample) <= middle;
        });
        if (below > rank) highest = middle;
        else lowest = middle + 1;
    }
    return sample_of<Sample>(lowest);
}

// rank_gather: the definition; every comparison loads its sample. SHAPED: not all samples of the box count.
template <typename Sample, bool SHAPED>
__global__ void __launch_bounds__(THREADS) rank_gather(
    const Sample* __restrict__ in, Sample* __restrict__ out, RankTask task, Sample cval, Sample nodata, Sample empty,
    const __grid_constant__ Footprint footprint) {
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < task.total; i += gridDim.x * (long long)THREADS)
        out[i] = ranked<SHAPED>(in, task, footprint, i, cval, nodata, empty);
}
