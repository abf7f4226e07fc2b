// Boxes of any size along both axes at once, for bytes. Part of smoothing.cu.
#pragma once

#include "pdl.cuh"
#include "cuda/boxes/running.cuh"

// box_column_sums: as box_running, but sums down the columns pass from warp to warp:
//   V[x] of row y is that of row y - 1 plus the entering sample less the leaving one, and
//   S[x], the sum of the window, is S[x - pixel] + V[right edge] - V[left edge].
// So each row is summed across once, not once as it enters and once as it leaves. In return a warp also sums the columns
// beside its results, which pays as long as windows are short compared with its strip. Sums of columns fit 16 bits, and two
// are added as one number of 32 bits: a borrow of the lower half is undone by its sum. The left edges of a lane's windows are
// its own columns, in registers; the right edges are those of lanes behind it, in shared memory.
//
//   rows of the team's next step ......... its ring        as in box_running
//     |  turn          the team of the step above has passed its sums on
//   one team         sums down the columns above + entering - leaving -> its sums, passed on: the next team's turn
//     |  its lanes     wait for each other, then read each other's sums
//   each team        sums across, a scan -> results, once the copy engine has read those before -> the copy engine stores them
//
// Floors for N samples (8192 x 8192 RGB) on an H200: 4.2 TB/s, 132 multiprocessors at 1.98 GHz, where in a clock 128 lanes
// issue, 64 multiply or permute, and 128 bytes of shared memory move:
//   bytes         2 N                                98 us
//   instructions  14 N issued (31 x 31, by ncu)      84 us
//   of these      4 N permute or add                 48 us
//   shared        12 N bytes                         72 us

template <int WORDS>
struct Columns {
    static constexpr int SAMPLES = 4 * WORDS, PAIRS = 2 * WORDS;  // of a lane: samples, and pairs of their columns' sums
    static constexpr int COUNT = (33 * PAIRS + 4 + 7) / 8 * 8;    // of a row's pairs, and of those read behind it, not used
    // Bytes of shared memory: of a row, with the rest of its first sector and last vector; and of a team.
    static constexpr int PITCH = 128 * WORDS + 64, TEAM = STAGES * 2 * PITCH + 4 * COUNT + 128 * WORDS;
};

// A lane's share of an unaligned row.
template <int WORDS>
__device__ inline void load_share(unsigned (&word)[WORDS + 1], const unsigned char* from) {
    const unsigned byte = shared_address(from) & 3, choice = 0x3210 + 0x1111 * byte;
    const unsigned* words = reinterpret_cast<const unsigned*>(from - byte);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = words[i];
    if (byte == 0) return;
    word[WORDS] = words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = __byte_perm(word[i], word[i + 1], choice);
}

// How two rows change the sums down the columns, which grow by `entering` and shrink by `leaving`. When a window moves, the
// first row enters and the second leaves; for the first window, both enter.
template <bool LEAVES, int WORDS>
__device__ inline void unpack(unsigned (&entering)[2 * WORDS], unsigned (&leaving)[2 * WORDS], const unsigned char* first,
                              const unsigned char* second) {
    unsigned a[WORDS + 1], b[WORDS + 1];
    load_share<WORDS>(a, first), load_share<WORDS>(b, second);
#pragma unroll
    for (int i = 0; i < 2 * WORDS; ++i) {
        const unsigned choice = i % 2 ? 0x4342 : 0x4140;
        entering[i] = __byte_perm(a[i / 2], 0, choice), leaving[i] = __byte_perm(b[i / 2], 0, choice);
        if (!LEAVES) leaving[i] = -leaving[i];
    }
}

// Sums of windows less that of the lane's first, and their change over the lane, all plus BIAS and so never negative: the left
// edges are `left`, the right edges start at column AHEAD of `right`.
constexpr unsigned BIAS = 1u << 31;

template <int CHANNELS, int AHEAD, int WORDS>
__device__ inline void sum_windows(unsigned (&sum)[4 * WORDS], unsigned (&total)[CHANNELS], const uint2* right,
                                   const unsigned (&left)[2 * WORDS]) {
    unsigned edge[2 * WORDS + 2];
#pragma unroll
    for (int i = 0; i < WORDS + (AHEAD > 0); ++i) edge[2 * i] = right[i].x, edge[2 * i + 1] = right[i].y;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) total[c] = BIAS;
#pragma unroll
    for (int j = 0; j < 4 * WORDS; ++j) {
        sum[j] = total[j % CHANNELS];
        const unsigned choice = ((j + AHEAD) % 2 ? 0x32 : 0x10) | (j % 2 ? 0x7600 : 0x5400);
        total[j % CHANNELS] = dot<unsigned short>(__byte_perm(edge[(j + AHEAD) / 2], left[j / 2], choice), 0xFF01u, sum[j]);
    }
}

// The high word of a b + c, in one instruction.
__device__ inline unsigned high_word(unsigned a, unsigned b, unsigned long long c) {
    unsigned high;
    asm("{\n.reg .u32 low;\nmad.lo.cc.u32 low, %1, %2, %3;\nmadc.hi.u32 %0, %1, %2, %4;\n}"
        : "=r"(high)
        : "r"(a), "r"(b), "r"(static_cast<unsigned>(c)), "r"(static_cast<unsigned>(c >> 32)));
    return high;
}

template <int CHANNELS, int WORDS, int TEAMS>
__global__ void __launch_bounds__(32 * TEAMS, 1)
box_column_sums(const unsigned char* __restrict__ in, unsigned char* __restrict__ out, Picture picture, Mean mean) {
    typedef Columns<WORDS> Shape;
    constexpr int SAMPLES = Shape::SAMPLES, PITCH = Shape::PITCH;
    static_assert(SAMPLES % CHANNELS == 0, "a lane has whole pixels");
    extern __shared__ __align__(32) unsigned char shared[];
    __shared__ __align__(8) unsigned long long arrivals[TEAMS][STAGES];
    __shared__ Beyond beyond;
    __shared__ Turns<TEAMS> turns;
    const int teams = blockDim.x / 32;
    const int team = opaque(static_cast<int>(threadIdx.x / 32)), lane = opaque(static_cast<int>(threadIdx.x % 32));
    const Part part = part_of(blockIdx.x, picture, mean);
    const int outputs = part.x_end - part.x, distance = mean.taps_x * CHANNELS;
    unsigned char* out_tile = first_of(out, part, picture);
    const auto strip = strip_of<unsigned char, CHANNELS, 1>(in, part, picture, mean, 0);
    const int steps = strip.warm + part.y_end - part.y_begin;
    // Of the team: its ring of rows, the sums down the columns, and the results of a step.
    unsigned char* ring = shared + team * Shape::TEAM;
    const auto columns_of = [&](int of) { return reinterpret_cast<uint2*>(shared + of * Shape::TEAM + STAGES * 2 * PITCH); };
    uint2* columns = columns_of(team);
    const uint2* above = columns_of(team == 0 ? teams - 1 : team - 1);  // of the row above
    unsigned* results = reinterpret_cast<unsigned*>(columns) + Shape::COUNT;

    Feed<unsigned char, CHANNELS, 1> feed(strip, picture, beyond, ring, arrivals[team], PITCH, steps, team, lane);
    beyond.fill<CHANNELS>(strip, picture);
    turns.begin(team, lane);
    for (int i = lane; i < Shape::COUNT / 2; i += 32) columns[i] = make_uint2(0, 0);
    __syncthreads();
    const unsigned long long multiplier = mean.multiplier;

    grid_dependency_synchronize();
    feed.ask(0);
#pragma unroll 1
    for (unsigned turn = 0;; ++turn) {
        const int step = turn * teams + team;
        if (step >= steps) break;
        const bool warming = step < strip.warm;
        unsigned char* taken[2];
        feed.take(turn, taken);
        const unsigned char *first = taken[0] + 4 * lane * WORDS, *second = taken[1] + 4 * lane * WORDS;
        unsigned column[Shape::PAIRS], leaving[Shape::PAIRS];  // `column` first holds what enters
        if (warming) unpack<false, WORDS>(column, leaving, first, second);
        else unpack<true, WORDS>(column, leaving, first, second);

        // The sums go from team to team. As much as possible is computed before the turn comes, since the others wait for it.
        if (teams > 1 && step > 0) turns.await(team, turn);
        uint2 sums[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) sums[i] = above[lane * WORDS + i];
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            column[2 * i] += sums[i].x - leaving[2 * i], column[2 * i + 1] += sums[i].y - leaving[2 * i + 1];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) columns[lane * WORDS + i] = make_uint2(column[2 * i], column[2 * i + 1]);
        if (teams > 1 && step + 1 < steps) turns.pass_on(team, teams);
        if (warming) continue;

        __syncwarp();  // the warp's sums are visible, and the last turn's results have been read
        unsigned sum[SAMPLES], total[CHANNELS], before[CHANNELS];
        int first_window[CHANNELS];
        // Lanes without results take any sums, since their windows would end behind these.
        const uint2* right = columns + (lane * SAMPLES < outputs ? lane * WORDS : 0) + distance / 4;
        const auto sum_by = [&](auto ahead) { sum_windows<CHANNELS, ahead.value, WORDS>(sum, total, right, column); };
        switch (distance % 4) {
            case 0: sum_by(Known<0>()); break;
            case 1: sum_by(Known<1>()); break;
            case 2: sum_by(Known<2>()); break;
            default: sum_by(Known<3>());
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) first_window[c] = 0;
#pragma unroll 1
        for (int tap = lane * CHANNELS; tap < distance; tap += 32 * CHANNELS)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) first_window[c] += reinterpret_cast<const unsigned short*>(columns)[tap + c];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) total[c] -= BIAS;
        scan(before, total);
        unsigned long long rest[CHANNELS];  // to be added to the biased sum of a window times the multiplier
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
            rest[c] = (before[c] + warp_sum(first_window[c]) + mean.initial) * multiplier - BIAS * multiplier;

        wait_for_bulk_stores();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < SAMPLES; ++j) sum[j] = high_word(sum[j], mean.multiplier, rest[j % CHANNELS]);
        pack_row<unsigned char, WORDS>(results + lane * WORDS, sum, mean.shift);
        fence_bulk_copies();
        __syncwarp();
        store_row(out_tile + (step - strip.warm) * static_cast<long long>(picture.out_row_samples), results, outputs,
                  picture.aligned_out, lane);
    }
    wait_for_bulk_stores();  // before the block's shared memory is freed
}
