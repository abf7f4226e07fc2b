// Rows of a strip of an image, brought to shared memory whole and with what lies beyond their ends. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "bulk_copy.cuh"

constexpr int STAGES = 2;  // steps whose rows a warp holds in shared memory: in use, and on their way
constexpr int ZEROS = -2;  // in place of a row's number; -1: the constant beyond the edge

// Where the rows of a strip come from. ROWS: that a warp filters in a step.
template <typename Sample, int ROWS>
struct Strip {
    static constexpr int VECTOR = 16 / sizeof(Sample);
    static constexpr int SLOTS = 2 * ROWS;  // rows that are read in a step
    const Sample* plane;
    long long row_samples;
    int left, span;    // the first sample of a row that is needed, and how many are
    int first, taps;   // the first row of the window before the band's first; its rows
    int warm;          // steps that make that window

    // Rows of a step, in order: one that enters and one that leaves, or while the first window is made a second that
    // enters; then the next two.
    __device__ int row(int step, int index, const Picture& picture) const {
        int at = SLOTS * step + index;
        if (step >= warm) at = (step - warm) * ROWS + index / 2 + (index % 2 ? 0 : taps);
        else if (at >= taps) return ZEROS;
        return border_index(first + at, picture.rows, picture.mode_y);
    }
    __device__ const Sample* line(int row) const { return plane + max(row, 0) * row_samples; }
    // Samples between the 16 bytes that hold the first sample of the first row and it.
    __device__ int skew_of_rows() const {
        return static_cast<unsigned>(reinterpret_cast<unsigned long long>(plane)) % 16 / sizeof(Sample);
    }
    // Samples between the 16 bytes that hold sample `left` and it.
    __device__ int skew(int row) const {
        const auto address = static_cast<unsigned>(reinterpret_cast<unsigned long long>(line(row) + left));
        return row < 0 ? 0 : address % 16 / sizeof(Sample);
    }
    // Whether a row's first or last vector, or what lies beyond, is needed.
    __device__ bool at_edge() const { return left < VECTOR || left + span > row_samples - VECTOR; }
    // The part of a row that whole vectors bring.
    __device__ int begin(int skew) const { return (left - skew) & (VECTOR - 1); }
    __device__ int end(int skew) const {
        const int length = static_cast<int>(row_samples);
        return length - ((length - begin(skew)) & (VECTOR - 1));
    }
};

// Asks for the rows of a step: lane i < SLOTS for row i. All lanes call this.
template <typename Sample, int ROWS>
__device__ inline void fetch(unsigned char* slots, int pitch, unsigned long long* arrival, const Strip<Sample, ROWS>& strip,
                             int row, int skew, bool at_edge, int lane, const Picture& picture) {
    constexpr int VECTOR = Strip<Sample, ROWS>::VECTOR, SLOTS = 2 * ROWS, BYTES = sizeof(Sample);
    int from = strip.left - skew, to = from + ((skew + strip.span + VECTOR - 1) & ~(VECTOR - 1));
    if (at_edge) from = max(from, strip.begin(skew)), to = max(min(to, strip.end(skew)), from);
    if (row < 0) to = from;
    const Sample* line = strip.line(row) + from;
    unsigned char* slot = slots + lane * pitch + (from - strip.left + skew) * BYTES;
#if __CUDA_ARCH__ >= 900
    if (lane < SLOTS) bulk_load(slot, line, (to - from) * BYTES, arrival, lane % 2 == 0);
#else
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) {
        const auto from_line = reinterpret_cast<const unsigned char*>(
            __shfl_sync(~0u, reinterpret_cast<unsigned long long>(line), i));
        const int offset = __shfl_sync(~0u, static_cast<int>(slot - slots), i), bytes = __shfl_sync(~0u, (to - from) * BYTES, i);
        for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_16_bytes(slots + offset + at, from_line + at);
    }
#endif
    if (!__any_sync(~0u, lane < SLOTS && row < 0)) return;
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) {
        const int beyond = __shfl_sync(~0u, row, i);
        if (beyond >= 0) continue;
        const unsigned fill = (beyond == ZEROS ? 0 : picture.fill) * (BYTES == 1 ? 0x01010101u : 0x00010001u);
#pragma unroll 1
        for (int at = 16 * lane; at < pitch; at += 16 * 32)
            *reinterpret_cast<uint4*>(slots + i * pitch + at) = make_uint4(fill, fill, fill, fill);
    }
    fence_bulk_copies();
}

// Writes what was not fetched of a step's rows: samples beyond the row's ends, and those of the vectors that straddle them.
template <int CHANNELS, typename Sample, int ROWS>
__device__ inline void patch(unsigned char* slots, int pitch, const Strip<Sample, ROWS>& strip, int row, int skew, int lane,
                             const Picture& picture) {
    constexpr int VECTOR = Strip<Sample, ROWS>::VECTOR, SLOTS = 2 * ROWS;
    const int left = strip.left, right = strip.left + strip.span, length = picture.row_samples;
    int rows[SLOTS], begin[SLOTS], end[SLOTS];  // of the samples of a row that were fetched
    Sample* samples[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int skewed = __shfl_sync(~0u, skew, i);
        rows[i] = __shfl_sync(~0u, row, i);
        begin[i] = strip.begin(skewed), end[i] = strip.end(skewed);
        samples[i] = reinterpret_cast<Sample*>(slots + i * pitch) + skewed - left;
    }
    const int before = min(max(VECTOR - 1 - left, 0), strip.span);
    const int after = min(max(right - (length - (VECTOR - 1)), 0), strip.span - before);
#pragma unroll 1
    for (int i = lane; i < before + after; i += 32) {
        const int at = i < before ? left + i : right - after + i - before;
        const int shifted = at + 1024 * CHANNELS;  // never negative
        const int pixel = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
        const int from = pixel * CHANNELS + shifted % CHANNELS;
        Sample value[SLOTS];
#pragma unroll
        for (int k = 0; k < SLOTS; ++k) {
            if (pixel < 0) value[k] = static_cast<Sample>(picture.fill);
            else if (from >= max(begin[k], left) && from < min(end[k], right)) value[k] = samples[k][from];
            else value[k] = __ldg(strip.line(rows[k]) + from);
        }
#pragma unroll
        for (int k = 0; k < SLOTS; ++k)
            if (rows[k] >= 0 && (at < begin[k] || at >= end[k])) samples[k][at] = value[k];
    }
    fence_bulk_copies();
}

// The same by a table, where all rows lie alike in vectors and the samples beyond an end are copies of some that were fetched.
struct Beyond {
    static constexpr int MOST = 1152;  // samples: 255 pixels of four channels, and some
    short source[MOST];                // counted from the first sample needed; -1: the constant
    int useless;                       // some are not among the samples fetched

    // All threads of the block call this, and wait for each other after it.
    template <int CHANNELS, typename Sample, int ROWS>
    __device__ void fill(const Strip<Sample, ROWS>& strip, const Picture& picture) {
        if (threadIdx.x == 0) useless = (picture.row_samples | strip.skew_of_rows()) % Strip<Sample, ROWS>::VECTOR != 0;
        __syncthreads();
        if (!strip.at_edge()) return;
        const int left = strip.left, right = left + strip.span, length = picture.row_samples;
        const int before = max(-left, 0), count = before + max(right - length, 0);
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const int shifted = (i < before ? left + i : length + i - before) + 1024 * CHANNELS;  // never negative
            const int pixel = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
            const int from = pixel * CHANNELS + shifted % CHANNELS - left;
            if (pixel >= 0 && (from < 0 || from >= strip.span)) useless = 1;
            source[i] = static_cast<short>(pixel < 0 ? -1 : from);
        }
    }

    template <typename Sample, int ROWS>
    __device__ void patch(unsigned char* slots, int pitch, const Strip<Sample, ROWS>& strip, int row, int skew, int lane,
                          const Picture& picture) const {
        const int left = strip.left, before = max(-left, 0), end = picture.row_samples - left;
        const int count = before + max(strip.span - end, 0);
        constexpr int SLOTS = 2 * ROWS;
        Sample* samples[SLOTS];
        bool whole[SLOTS];  // rows beyond the edge are constant already
#pragma unroll
        for (int k = 0; k < SLOTS; ++k) {
            samples[k] = reinterpret_cast<Sample*>(slots + k * pitch) + __shfl_sync(~0u, skew, k);
            whole[k] = __shfl_sync(~0u, row, k) < 0;
        }
#pragma unroll 1
        for (int i = lane; i < count; i += 32) {
            const int from = source[i], at = i < before ? i : end + i - before;
            Sample value[SLOTS];
#pragma unroll
            for (int k = 0; k < SLOTS; ++k) value[k] = from < 0 ? static_cast<Sample>(picture.fill) : samples[k][from];
#pragma unroll
            for (int k = 0; k < SLOTS; ++k)
                if (!whole[k]) samples[k][at] = value[k];
        }
        fence_bulk_copies();
    }
};

// The rows of a warp (team), step by step: it takes every so many of the block's steps.
template <typename Sample, int CHANNELS, int ROWS>
struct Feed {
    static constexpr int SLOTS = Strip<Sample, ROWS>::SLOTS;
    const Strip<Sample, ROWS>& strip;
    const Picture& picture;
    const Beyond& beyond;
    unsigned char* ring;           // STAGES times SLOTS rows in shared memory
    unsigned long long* arrivals;  // of each stage
    int pitch;                     // bytes of a row
    int team, teams, steps, lane;
    bool at_edge;
    int skew = 0, next_row = 0, next_skew = 0;  // of the step taken, and of the one asked for, in lane i for row i

    __device__ Feed(const Strip<Sample, ROWS>& strip, const Picture& picture, const Beyond& beyond, unsigned char* ring,
                    unsigned long long* arrivals, int pitch, int steps)
        : strip(strip), picture(picture), beyond(beyond), ring(ring), arrivals(arrivals), pitch(pitch),
          team(threadIdx.x / 32), teams(blockDim.x / 32), steps(steps), lane(threadIdx.x % 32), at_edge(strip.at_edge()) {
        if (lane < STAGES) init_arrival(&arrivals[lane], SLOTS);
        fence_bulk_copies();
        __syncwarp();
    }
    __device__ unsigned char* slots(unsigned turn) const { return ring + turn % STAGES * SLOTS * pitch; }

    // Asks for the rows of the team's step of that turn, if there is one.
    __device__ void ask(unsigned turn) {
        const int step = turn * teams + team;
        if (step >= steps) return;
        next_row = strip.row(step, lane % SLOTS, picture), next_skew = strip.skew(next_row);
        fetch(slots(turn), pitch, &arrivals[turn % STAGES], strip, next_row, next_skew, at_edge, lane, picture);
    }

    // Waits for the rows that were asked for, asks for the next, and puts what lies beyond the ends beside those that came.
    __device__ void take(unsigned turn) {
        const int row = next_row;
        skew = next_skew;
        wait_for_arrival(&arrivals[turn % STAGES], turn / STAGES);
#if __CUDA_ARCH__ < 900
        wait_for_copies();
#endif
        __syncwarp();
        ask(turn + 1);
        if (!at_edge) return;
        if (beyond.useless) patch<CHANNELS>(slots(turn), pitch, strip, row, skew, lane, picture);
        else beyond.patch(slots(turn), pitch, strip, row, skew, lane, picture);
        __syncwarp();
    }

    // Where the strip begins in one of the rows taken.
    __device__ const unsigned char* row(unsigned turn, int slot) const {
        return slots(turn) + slot * pitch + __shfl_sync(~0u, skew, slot) * static_cast<int>(sizeof(Sample));
    }
};
