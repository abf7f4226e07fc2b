// Boxes of any size along both axes at once, for whole numbers. Part of smoothing.cu.
#pragma once

#include "bands.cuh"

// box_running: boxes of any size over whole numbers, in time that does not depend on the size. A block walks down a band
// of rows; each thread keeps the sums down its four columns, adding the row that enters the window and subtracting the one
// that leaves (again from L2). Along a row each warp then makes prefix sums, and a window is the difference of two.
constexpr int RUNNING_THREADS = 256;  // a warp for each of ROWS rows
constexpr int CHUNK = 32;             // samples of a row that a lane sums

struct Mean {
    int before_y, taps_y, before_x, taps_x;
    unsigned half, multiplier, shift;  // (sum + half) * multiplier >> 32 + shift is the mean, exactly (checked in fused.py)
    int outputs;                       // samples of a row that a block writes
};

// Four samples added to their columns' sums, or with SIGN -1 subtracted.
template <int SIGN, typename Sample>
__device__ inline void accumulate(unsigned (&sum)[4], const Packed<Sample>& packed) {
    if constexpr (sizeof(Sample) == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += SIGN * __byte_perm(packed.word[0], 0, 0x4440 | j);
    } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned word = same<Sample, short> ? packed.word[j] ^ 0x80008000u : packed.word[j];
            sum[2 * j] += SIGN * (word & 0xFFFFu);
            sum[2 * j + 1] += SIGN * (word >> 16);
        }
    }
}

// Word of a warp's row where sample `at` stands: 4 free words after each chunk keep the banks apart.
template <int WORDS>
__device__ inline int padded(int at) { return at + at / WORDS * 4; }

// Inclusive sums along the row over the samples of each channel, from each lane's chunk on its own to the whole row.
template <int CHANNELS>
__device__ inline void prefix_sums(unsigned (&sum)[CHUNK], int lane) {
#pragma unroll
    for (int j = CHANNELS; j < CHUNK; ++j) sum[j] += sum[j - CHANNELS];
    // Sample j of the lane belongs to channel (phase + j) % CHANNELS.
    const int phase = lane * CHUNK % CHANNELS;
    unsigned before[CHANNELS];
#pragma unroll
    for (int channel = 0; channel < CHANNELS; ++channel) {
        unsigned total = 0;
#pragma unroll
        for (int j = CHUNK - CHANNELS; j < CHUNK; ++j)
            if ((phase + j) % CHANNELS == channel) total = sum[j];
        unsigned scanned = total;
#pragma unroll
        for (int reach = 1; reach < 32; reach *= 2) {
            const unsigned other = __shfl_up_sync(~0u, scanned, reach);
            if (lane >= reach) scanned += other;
        }
        before[channel] = scanned - total;
    }
    unsigned mine[CHANNELS];
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        mine[j] = before[0];
#pragma unroll
        for (int channel = 1; channel < CHANNELS; ++channel)
            if ((phase + j) % CHANNELS == channel) mine[j] = before[channel];
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum[j] += mine[j % CHANNELS];
}

// The chunk's means: differences to the prefix sums that begin SHIFT words after `quads[0]`.
template <int SHIFT, typename Sample>
__device__ inline void means(Packed<Sample> (&done)[CHUNK / 4], const unsigned (&sum)[CHUNK], const uint4 (&quads)[9],
                             const Mean& mean) {
    unsigned right[36];
#pragma unroll
    for (int i = 0; i < 9; ++i)
        right[4 * i] = quads[i].x, right[4 * i + 1] = quads[i].y, right[4 * i + 2] = quads[i].z, right[4 * i + 3] = quads[i].w;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        unsigned bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            bits[j] = __umulhi(right[i + j + SHIFT] - sum[i + j] + mean.half, mean.multiplier) >> mean.shift;
        done[i / 4] = pack<Sample>(bits);
        if constexpr (same<Sample, short>) done[i / 4].word[0] ^= 0x80008000u, done[i / 4].word[1] ^= 0x80008000u;
    }
}

// Moves a lane's packed samples `skip` (0 … 3) places to the front; what follows comes from the next lane.
template <typename Sample>
__device__ inline void skip_samples(Packed<Sample> (&done)[CHUNK / 4], int skip) {
    constexpr int WORDS = CHUNK * sizeof(Sample) / 4, PER = sizeof(Sample);
    unsigned word[WORDS + 2];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = done[i / PER].word[i % PER];
    word[WORDS] = __shfl_down_sync(~0u, word[0], 1);
    word[WORDS + 1] = __shfl_down_sync(~0u, word[1], 1);
    const int bytes = skip * sizeof(Sample);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned low = bytes & 4 ? word[i + 1] : word[i], high = bytes & 4 ? word[i + 2] : word[i + 1];
        done[i / PER].word[i % PER] = __funnelshift_r(low, high, 8 * (bytes & 3));
    }
}

template <typename Sample, int CHANNELS>
__global__ void __launch_bounds__(RUNNING_THREADS, 2)
box_running(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Mean mean) {
    constexpr int WIDTH = 4 * RUNNING_THREADS, PITCH = WIDTH + WIDTH / CHUNK * 4, VECTOR = 16 / sizeof(Sample);
    constexpr int RESULT_WORDS = CHUNK * sizeof(Sample) / 4;  // of a lane
    __shared__ __align__(16) unsigned sums[ROWS][PITCH];
    const Place place = place_of(blockIdx.x, picture);
    const Sample* in_plane = in + place.plane * picture.rows * picture.row_samples;
    Sample* out_plane = out + place.plane * picture.out_rows * picture.out_row_samples;
    const int x = place.tile * mean.outputs, x_end = min(x + mean.outputs, picture.out_row_samples);
    const int y_begin = place.band * picture.band_rows, y_end = min(y_begin + picture.band_rows, picture.out_rows);
    // Prefix sum s is the one just before the window of output x + s - skip; `skip` makes the loads aligned.
    const int before = (mean.before_x + 1) * CHANNELS - picture.centre_x, skip = (4 - before % 4) % 4;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32, column = 4 * static_cast<int>(threadIdx.x);
    const Columns columns = columns_at<CHANNELS>(x - before - skip + column, picture);
    const int distance = mean.taps_x * CHANNELS;  // from the prefix sum before a window to its last

    unsigned sum[4] = {0, 0, 0, 0};
    Packed<Sample> entering[ROWS], leaving[ROWS];
    const int first = y_begin + picture.centre_y - mean.before_y - 1;  // of the window before the band's first
    for (int i = 0; i < mean.taps_y; i += ROWS) {
        load_rows<ROWS>(entering, in_plane, first + i, columns, picture);
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            if (i + k < mean.taps_y) accumulate<1>(sum, entering[k]);
    }
    load_rows<ROWS>(entering, in_plane, first + mean.taps_y, columns, picture);
    load_rows<ROWS>(leaving, in_plane, first, columns, picture);
#pragma unroll 1
    for (int y = y_begin; y < y_end; y += ROWS) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            accumulate<1>(sum, entering[i]);
            accumulate<-1>(sum, leaving[i]);
            *reinterpret_cast<uint4*>(&sums[i][padded<CHUNK>(column)]) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
        }
        if (y + ROWS < y_end) {
            const int next = first + y - y_begin + ROWS;
            load_rows<ROWS>(entering, in_plane, next + mean.taps_y, columns, picture);
            load_rows<ROWS>(leaving, in_plane, next, columns, picture);
        }
        __syncthreads();

        uint4* chunk = reinterpret_cast<uint4*>(&sums[row][padded<CHUNK>(lane * CHUNK)]);
        unsigned prefix[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            const uint4 quad = chunk[i];
            prefix[4 * i] = quad.x, prefix[4 * i + 1] = quad.y, prefix[4 * i + 2] = quad.z, prefix[4 * i + 3] = quad.w;
        }
        prefix_sums<CHANNELS>(prefix, lane);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i)
            chunk[i] = make_uint4(prefix[4 * i], prefix[4 * i + 1], prefix[4 * i + 2], prefix[4 * i + 3]);
        __syncwarp();
        uint4 quads[9];
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const int at = min(lane * CHUNK + distance / 4 * 4 + 4 * i, WIDTH - 4);
            quads[i] = *reinterpret_cast<const uint4*>(&sums[row][padded<CHUNK>(at)]);
        }
        Packed<Sample> done[CHUNK / 4];
        switch (distance % 4) {
            case 0: means<0>(done, prefix, quads, mean); break;
            case 1: means<1>(done, prefix, quads, mean); break;
            case 2: means<2>(done, prefix, quads, mean); break;
            default: means<3>(done, prefix, quads, mean);
        }
        skip_samples(done, skip);
        __syncwarp();
        unsigned* staged = &sums[row][padded<RESULT_WORDS>(lane * RESULT_WORDS)];
#pragma unroll
        for (int i = 0; i < RESULT_WORDS; ++i) staged[i] = done[i / sizeof(Sample)].word[i % sizeof(Sample)];
        __syncwarp();
        if (y + row < y_end) {
            Sample* line = out_plane + (y + row) * static_cast<long long>(picture.out_row_samples);
#pragma unroll
            for (int i = 0; i < WIDTH / VECTOR / 32; ++i) {
                const int at = (lane + 32 * i) * VECTOR;
                const unsigned* from = &sums[row][padded<RESULT_WORDS>(at * sizeof(Sample) / 4)];
                if (picture.aligned_out && x + at + VECTOR <= x_end)
                    *reinterpret_cast<uint4*>(line + x + at) = *reinterpret_cast<const uint4*>(from);
                else
                    for (int j = 0; x + at + j < x_end && j < VECTOR; ++j)
                        line[x + at + j] = reinterpret_cast<const Sample*>(from)[j];
            }
        }
        __syncthreads();
    }
}
