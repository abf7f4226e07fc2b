// Copies whole rows of a strip of an image to shared memory, with the samples beyond their ends. Part of smoothing.cu.
//
// Each warp feeds itself, and waits for its own copies only:
//
//   ask(0) .......... rows of turn 0        the copy engine (before sm_90 the lanes) copies them to the first of STAGES stages
//   take(turn)        waits for the mbarrier of the turn's stage, on which its copies arrive
//     |               ask(turn + 1): copies to the other stage, whose rows the warp has used
//     |               samples beyond a row's ends, by the lanes
//   the warp's step   uses the rows
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "bulk_copy.cuh"
#include "opaque.cuh"

constexpr int STAGES = 2;  // steps whose rows a warp holds in shared memory: in use, and in flight
constexpr int ZEROS = -(1 << 30);  // stands for a row of zeros; -1: a row of the constant beyond the edge

// The rows of a strip. ROWS: that a warp filters in a step.
template <typename Sample, int ROWS>
struct Strip {
    static constexpr int VECTOR = 16 / sizeof(Sample);
    static constexpr int SLOTS = 2 * ROWS;  // rows that are read in a step
    const Sample* plane;
    long long row_samples;
    int left, span;    // the first sample needed of a row, and their number
    int first, taps;   // the first row of the window before the band's first; its number of rows
    int warm;          // steps that compute that window

    // Rows of a step, in order: one that enters and one that leaves (for the first window, a second that enters); then the
    // next two. They may lie beyond the edge; ZEROS: none is needed.
    __device__ int row(int step, int index) const {
        if (step >= warm) return first + (step - warm) * ROWS + index / 2 + (index % 2 ? 0 : taps);
        return SLOTS * step + index < taps ? first + SLOTS * step + index : ZEROS;
    }
    __device__ const Sample* line(int row) const { return plane + max(row, 0) * row_samples; }
    // Samples before sample `left` in its 32 bytes: a row is aligned in its slot as it is in memory, since copies that split
    // sectors take longer.
    __device__ int skew(int row) const {
        return static_cast<unsigned>(reinterpret_cast<unsigned long long>(line(row) + left)) % 32 / sizeof(Sample);
    }
    // The same for the first sample of the first row, in its 16 bytes.
    __device__ int skew_of_rows() const {
        return static_cast<unsigned>(reinterpret_cast<unsigned long long>(plane)) % 16 / sizeof(Sample);
    }
    // Whether a row's first or last vector, or a sample beyond, is needed.
    __device__ bool at_edge() const { return left < VECTOR || left + span > row_samples - VECTOR; }
    // The part of a row that whole vectors cover.
    __device__ int begin(int skew) const { return (left - skew) & (VECTOR - 1); }
    __device__ int end(int skew) const {
        const int length = static_cast<int>(row_samples);
        return length - ((length - begin(skew)) & (VECTOR - 1));
    }
};

// Writes the samples of a step's rows that were not fetched: those beyond a row's ends or in vectors that straddle them.
template <int CHANNELS, typename Sample, int ROWS>
__device__ inline void patch(unsigned char* slots, int pitch, const Strip<Sample, ROWS>& strip, const int (&rows)[2 * ROWS],
                             const int (&skews)[2 * ROWS], int lane, const Picture& picture) {
    constexpr int VECTOR = Strip<Sample, ROWS>::VECTOR, SLOTS = 2 * ROWS;
    const int left = strip.left, right = strip.left + strip.span, length = picture.row_samples;
    int begin[SLOTS], end[SLOTS];  // of the samples of a row that were fetched
    Sample* samples[SLOTS];
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        begin[i] = strip.begin(skews[i]), end[i] = strip.end(skews[i]);
        samples[i] = reinterpret_cast<Sample*>(slots + i * pitch) + skews[i] - left;
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

// The same by a table, if all rows have the same alignment and the samples beyond an end are copies of fetched ones.
struct Beyond {
    static constexpr int MOST = 1152;  // samples: 255 pixels of four channels, and some
    short source[MOST];                // counted from the first sample needed; -1: the constant
    int useless;                       // whether some are not among the fetched samples

    // All threads of the block call this, and synchronize after it.
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
    __device__ void patch(unsigned char* const (&begin)[2 * ROWS], const Strip<Sample, ROWS>& strip,
                          const int (&rows)[2 * ROWS], int lane, const Picture& picture) const {
        const int left = strip.left, before = max(-left, 0), end = picture.row_samples - left;
        const int count = before + max(strip.span - end, 0);
        constexpr int SLOTS = 2 * ROWS;
#pragma unroll 1
        for (int i = lane; i < count; i += 32) {
            const int from = source[i], at = i < before ? i : end + i - before;
            Sample value[SLOTS];
#pragma unroll
            for (int k = 0; k < SLOTS; ++k)
                value[k] = from < 0 ? static_cast<Sample>(picture.fill) : reinterpret_cast<const Sample*>(begin[k])[from];
#pragma unroll
            for (int k = 0; k < SLOTS; ++k)
                if (rows[k] >= 0) reinterpret_cast<Sample*>(begin[k])[at] = value[k];  // others are constant already
        }
        fence_bulk_copies();
    }
};

// Feeds a warp (team) with the rows of its steps: those of the block are dealt to the teams in turn. The lanes plan the rows of
// several turns at once.
template <typename Sample, int CHANNELS, int ROWS>
struct Feed {
    static constexpr int SLOTS = Strip<Sample, ROWS>::SLOTS, BYTES = sizeof(Sample), TURNS = 32 / SLOTS;
    const Strip<Sample, ROWS>& strip;
    const Picture& picture;
    const Beyond& beyond;
    unsigned char* ring;  // STAGES times SLOTS rows in shared memory, at a multiple of 32 bytes
    unsigned arrivals;    // the address of the stages' mbarriers in shared memory
    int pitch;            // bytes of a row, a multiple of 32
    int team, teams, steps, lane;
    bool at_edge;
    unsigned long long policy;  // L2 policy of the lane's rows
    // The row that the lane planned: its number, the samples between the start of its slot and that of the strip, and the copy:
    // `bytes` from `source` to `place` among the slots.
    int row, skew, place, bytes;
    const unsigned char* source;

    __device__ Feed(const Strip<Sample, ROWS>& strip, const Picture& picture, const Beyond& beyond, unsigned char* ring,
                    unsigned long long* arrivals, int pitch, int steps, int team, int lane)
        : strip(strip), picture(picture), beyond(beyond), ring(ring), arrivals(opaque(shared_address(arrivals))),
          pitch(pitch), team(team), teams(blockDim.x / 32), steps(steps), lane(lane), at_edge(strip.at_edge()),
          policy(bulk_policy(lane % 2 == 0)) {
        if (lane < STAGES) init_arrival(&arrivals[lane], SLOTS);
        fence_bulk_copies();
        __syncwarp();
    }
    __device__ unsigned char* slots(unsigned turn) const { return ring + turn % STAGES * SLOTS * pitch; }

    // Lane i plans row i % SLOTS of turn `turn` + i / SLOTS.
    __device__ void plan(unsigned turn) {
        row = strip.row((turn + lane / SLOTS) * teams + team, lane % SLOTS);
        if (row != ZEROS) row = border_index(row, picture.rows, picture.mode_y);
        const Sample* line = strip.line(row) + strip.left;
        const int at = static_cast<unsigned>(reinterpret_cast<unsigned long long>(line)) % 32;
        int from = -(at & 15), to = from + ((at % 16 + strip.span * BYTES + 15) & ~15);  // bytes of the strip
        if (at_edge) {
            // The row's start, and its end if that is near.
            const int begin = -strip.left * BYTES, end = min(picture.row_samples - strip.left, strip.span + 64) * BYTES;
            from = max(from, begin + (-(at + begin) & 15));
            to = max(from, min(to, end - ((at + end) & 15)));
        }
        skew = at / BYTES;
        place = lane % SLOTS * pitch + at + from, bytes = row < 0 ? 0 : to - from;
        source = reinterpret_cast<const unsigned char*>(line) + from;
    }

    // Starts copying the rows of the team's step of that turn, if there is one.
    __device__ void ask(unsigned turn) {
        if (turn * teams + team >= steps) return;
        if (turn % TURNS == 0) plan(turn);
        const bool mine = lane / SLOTS == turn % TURNS;
#if __CUDA_ARCH__ >= 900
        if (mine) bulk_load(shared_address(slots(turn)) + place, source, bytes, arrivals + turn % STAGES * 8, policy);
#else
#pragma unroll 1
        for (int i = 0; i < SLOTS; ++i) {
            const int planner = turn % TURNS * SLOTS + i;
            const auto from = reinterpret_cast<const unsigned char*>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(source), planner));
            unsigned char* to = slots(turn) + __shfl_sync(~0u, place, planner);
            const int count = __shfl_sync(~0u, bytes, planner);
            for (int at = 16 * lane; at < count; at += 16 * 32) copy_16_bytes(to + at, from + at);
        }
#endif
        if (__any_sync(~0u, mine && row < 0)) fill_beyond(turn);
    }

    // Fills rows that are constant or zero.
    __device__ void fill_beyond(unsigned turn) const {
#pragma unroll 1
        for (int i = 0; i < SLOTS; ++i) {
            const int planned = __shfl_sync(~0u, row, turn % TURNS * SLOTS + i);
            if (planned >= 0) continue;
            const unsigned fill = (planned == ZEROS ? 0 : picture.fill) * (BYTES == 1 ? 0x01010101u : 0x00010001u);
#pragma unroll 1
            for (int at = 16 * lane; at < pitch; at += 16 * 32)
                *reinterpret_cast<uint4*>(slots(turn) + i * pitch + at) = make_uint4(fill, fill, fill, fill);
        }
        fence_bulk_copies();
    }

    // Waits for the rows of the turn, starts copying the next, and adds the samples beyond the ends. `begin` receives the start
    // of the strip in each row.
    __device__ void take(unsigned turn, unsigned char* (&begin)[SLOTS]) {
        int rows[SLOTS], skews[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            skews[i] = __shfl_sync(~0u, skew, turn % TURNS * SLOTS + i);
            begin[i] = slots(turn) + i * pitch + skews[i] * BYTES;
            if (at_edge) rows[i] = __shfl_sync(~0u, row, turn % TURNS * SLOTS + i);
        }
        wait_for_arrival(arrivals + turn % STAGES * 8, turn / STAGES);
#if __CUDA_ARCH__ < 900
        wait_for_copies();
#endif
        __syncwarp();
        ask(turn + 1);
        if (!at_edge) return;
        if (beyond.useless) patch<CHANNELS>(slots(turn), pitch, strip, rows, skews, lane, picture);
        else beyond.patch(begin, strip, rows, lane, picture);
        __syncwarp();
    }
};
