// Boxes of any size along both axes at once, for integers. Part of smoothing.cu.
#pragma once

#include "block_scan.cuh"
#include "mbarrier.cuh"
#include "cuda/boxes/strips.cuh"

// box_running: a warp filters a row or two of a strip in a step, in time that does not depend on the window. With
//   D[x] = entering row - leaving row,  the window of row y is that of row y - 1 plus W[x], the sum of D across,
//   and W[x] = W[x - pixel] + D[right edge] - D[left edge]:
// four samples, paired by a byte permutation and added by dp2a (dp4a), give each output, and only the lanes' totals are
// exchanged, by a scan. The warps of a block (teams of one) take turns down one strip: each has its own ring of rows, which
// the copy engine fills, lets the engine store its results, and gets the sums of the row above through shared memory. So
// many warps hide latency, yet a device walks few columns at once, and for windows up to about 60 rows of 16 bits the
// leaving rows are still in L2.
//
//   rows of the team's next step ......... its ring        the copy engine; the team waits for their mbarrier (strips.cuh)
//     |
//   each team        differences along the rows, a scan of the lanes' totals
//     |  turn          the team of the step above has passed its sums on: a named barrier of these two
//   one team         sums above + differences -> sums, passed on: the next team's turn
//     |
//   each team        sums -> results, once the copy engine has read those before -> the copy engine stores them
//
// Floors for N samples of b bytes (8192 x 8192 RGB; b = 2, 1) on an H200: 4.2 TB/s, 132 multiprocessors at 1.98 GHz, where in
// a clock 128 lanes issue, 64 multiply or permute, and 128 bytes of shared memory move:
//   bytes         2 N b                                     192 us, 98 us (3 N b if the leaving rows are not in L2)
//   instructions  24 N, 16 N issued (31 x 31, 127 x 127)    144 us, 96 us (counted by ncu)
//   of these      4 N on the multiplier: dp2a, high word    48 us, 48 us
//   shared        (8 b + 8) N bytes                         144 us, 96 us

struct Mean {
    int before_y, taps_y, before_x, taps_x;
    unsigned initial;            // the sum of an empty window: 1/2 of a unit, and the bias of signed samples
    unsigned multiplier, shift;  // sum * multiplier >> 32 + shift is the mean, exactly (checked in running.py)
    int outputs;                 // samples of a row that a block writes
    int pitch;                   // bytes of a row in shared memory
    int band_rows;               // rows that a block writes
    int edge_band_rows;          // rows that a block at the left or right edge writes, where rows take longer
};

// sum + the products of the two (four) samples of `word` with the signed bytes of `weights`.
template <typename Sample>
__device__ inline unsigned dot(unsigned word, unsigned weights, unsigned sum) {
    unsigned result;
    if constexpr (sizeof(Sample) == 1)
        asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(weights), "r"(sum));
    else if constexpr (same<Sample, short>)
        asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(weights), "r"(sum));
    else
        asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(weights), "r"(sum));
    return result;
}

// The half of a word with which a lane's samples start at an edge of its windows; ANY: not known, or not at a half.
enum Halves { EVEN, ODD, ANY };

template <int VALUE>
struct Known {
    static constexpr int value = VALUE;
};

// The samples of an entering and of a leaving row at one edge of a lane's windows, in pairs.
template <typename Sample, int SAMPLES, int HALVES>
struct Pairs {
    static constexpr int A_WORD = 4 / sizeof(Sample), WORDS = SAMPLES / A_WORD;
    unsigned entering[WORDS + 1], leaving[WORDS + 1];

    __device__ Pairs(const unsigned char* from_entering, const unsigned char* from_leaving) {
        load(entering, from_entering);
        load(leaving, from_leaving);
    }
    __device__ static void load(unsigned (&word)[WORDS + 1], const unsigned char* from) {
        const unsigned byte = shared_address(from) & 3, choice = 0x3210 + 0x1111 * byte;
        const unsigned* words = reinterpret_cast<const unsigned*>(from - byte);
#pragma unroll
        for (int i = 0; i < WORDS + (HALVES != EVEN); ++i) word[i] = words[i];
#pragma unroll
        for (int i = 0; HALVES == ANY && i < WORDS; ++i) word[i] = __byte_perm(word[i], word[i + 1], choice);
    }
    // The pair of sample j and, if a word has four, that of j + 1; j is a multiple of half the samples of a word.
    __device__ unsigned at(int j) const {
        const int place = j + (HALVES == ODD), word = place / A_WORD;
        const bool upper = place % A_WORD >= A_WORD / 2;
        return __byte_perm(entering[word], leaving[word], sizeof(Sample) == 1 ? (upper ? 0x7362 : 0x5140) : (upper ? 0x7632 : 0x5410));
    }
};

template <typename Sample, int CHANNELS, int RIGHT, int LEFT, int SAMPLES>
__device__ inline void window_changes(unsigned (&change)[SAMPLES], unsigned (&total)[CHANNELS], const unsigned char* entering,
                                      const unsigned char* leaving, int distance, unsigned weights, unsigned opposite) {
    constexpr int PAIRED = 2 / sizeof(Sample);
    const Pairs<Sample, SAMPLES, RIGHT> right(entering + distance, leaving + distance);
    const Pairs<Sample, SAMPLES, LEFT> left(entering, leaving);
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) total[c] = 0;
#pragma unroll
    for (int j = 0; j < SAMPLES; ++j) {
        unsigned& sum = total[j % CHANNELS];
        sum = dot<Sample>(right.at(j / PAIRED * PAIRED), weights << 16 * (j % PAIRED), sum);
        sum = dot<Sample>(left.at(j / PAIRED * PAIRED), opposite << 16 * (j % PAIRED), sum);
        change[j] = sum;
    }
}

// The excess of each window's change over that of the pixel before, summed over the lane; `total` receives the lane's sums.
// weights: of (entering, leaving) at the right edge; opposite: at the left. left_byte: of a word, where a lane's samples start
// at the left edge; alike: the same in both rows.
template <typename Sample, int CHANNELS, int SAMPLES>
__device__ inline void window_changes(unsigned (&change)[SAMPLES], unsigned (&total)[CHANNELS], const unsigned char* entering,
                                      const unsigned char* leaving, int distance, unsigned weights, unsigned opposite,
                                      bool alike, int left_byte) {
    const int right_byte = (left_byte + distance) % 4;
    const auto changes = [&](auto right, auto left) {
        window_changes<Sample, CHANNELS, right.value, left.value>(change, total, entering, leaving, distance, weights, opposite);
    };
    constexpr int OTHER = sizeof(Sample) == 2 ? ODD : ANY;
    if (sizeof(Sample) == 2 && !alike) changes(Known<ANY>(), Known<ANY>());
    else if (alike && right_byte == 0 && left_byte == 0) changes(Known<EVEN>(), Known<EVEN>());
    else if (alike && right_byte == 0) changes(Known<EVEN>(), Known<OTHER>());
    else if (alike && left_byte == 0) changes(Known<OTHER>(), Known<EVEN>());
    else changes(Known<OTHER>(), Known<OTHER>());
}

// Sums over all lanes before this one.
template <int COUNT>
__device__ inline void scan(unsigned (&before)[COUNT], const unsigned (&own)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) before[i] = own[i];
#pragma unroll
    for (int reach = 1; reach < 32; reach *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            asm("{\n.reg .pred p;\n.reg .u32 other;\nshfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n@p add.u32 %0, %0, other;\n}"
                : "+r"(before[i])
                : "r"(reach));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) before[i] -= own[i];
}

// The packed means of a word's windows, from the high words of sum * multiplier. BYTEWISE: the shift is by whole bytes, which
// packing does.
template <typename Sample, bool BYTEWISE>
__device__ inline unsigned packed_means(const unsigned* high, unsigned shift) {
    const unsigned byte = BYTEWISE ? shift / 8 : 0;
    unsigned bits[4];
#pragma unroll
    for (int k = 0; k < 4 / static_cast<int>(sizeof(Sample)); ++k) bits[k] = BYTEWISE ? high[k] : high[k] >> shift;
    if constexpr (sizeof(Sample) == 2)
        return __byte_perm(bits[0], bits[1], 0x5410 + 0x1111 * byte) ^ (same<Sample, short> ? 0x80008000u : 0u);
    else
        return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040 + 0x0011 * byte),
                           __byte_perm(bits[2], bits[3], 0x0040 + 0x0011 * byte), 0x5410);
}

template <typename Sample, int WORDS>
__device__ inline void pack_row(unsigned* results, const unsigned (&high)[4 / sizeof(Sample) * WORDS], unsigned shift) {
    constexpr int A_WORD = 4 / sizeof(Sample);
    if (shift % 8 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) results[i] = packed_means<Sample, true>(&high[i * A_WORD], shift);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) results[i] = packed_means<Sample, false>(&high[i * A_WORD], shift);
    }
}

// Writes a warp's samples of a row. If the copy engine does it, it reads `results` until the warp's wait_for_bulk_stores.
template <typename Sample>
__device__ inline void store_row(Sample* line, const unsigned* results, int samples, bool aligned, int lane) {
    constexpr int BYTES = sizeof(Sample), A_WORD = 4 / BYTES;
    if (aligned) {
#if __CUDA_ARCH__ >= 900
        if (elected()) bulk_store(line, results, samples * BYTES);
#else
#pragma unroll 4
        for (int i = lane; i < samples * BYTES / 16; i += 32)
            __stcs(reinterpret_cast<uint4*>(line) + i, reinterpret_cast<const uint4*>(results)[i]);
#endif
        return;
    }
    // Whole words of memory, and the samples before the first and after the last.
    const int byte = static_cast<int>(-reinterpret_cast<long long>(line) & 3), before = min(byte / BYTES, samples);
    const int whole = (samples - before) / A_WORD, rest = samples - before - whole * A_WORD;
    unsigned* target = reinterpret_cast<unsigned*>(line + before);
#pragma unroll 4
    for (int i = lane; i < whole; i += 32)
        __stcs(target + i, byte == 0 ? results[i] : __funnelshift_r(results[i], results[i + 1], 8 * byte));
    if (lane < before + rest) {
        const int i = lane < before ? lane : samples - rest + lane - before;
        __stcs(line + i, reinterpret_cast<const Sample*>(results)[i]);
    }
}

// The teams' turns: the next team sees everything that a team wrote before it passed the turn on. compute-sanitizer does not
// follow the arrival on a named barrier: for it alone (TURNS_BY_MBARRIERS), mbarriers do the same, 3 to 15 % slower (H200).
template <int TEAMS>
struct Turns {
#ifdef TURNS_BY_MBARRIERS
    Mbarrier barriers[TEAMS];
    __device__ void begin(int team, int lane) {
        if (lane == 0) init<32>(barriers + team);
    }
    __device__ void pass_on(int team, int teams) { arrive(barriers + (team + 1 == teams ? 0 : team + 1)); }
    __device__ void await(int team, int turn) { wait<32>(barriers + team, turn - (team == 0)); }
#else
    static_assert(TEAMS <= 16, "a named barrier each, of which one has been the block's");
    __device__ void begin(int, int) {}
    __device__ void pass_on(int team, int teams) {
        asm volatile("bar.arrive %0, 64;" ::"r"(team + 1 == teams ? 0 : team + 1) : "memory");
    }
    __device__ void await(int team, int) { asm volatile("bar.sync %0, 64;" ::"r"(team) : "memory"); }
#endif
};

// The part of the results that a block computes: as in place_of, except that bands at the edges have another height.
struct Part {
    int x, x_end, y_begin, y_end;
    long long plane;
};

__device__ inline Part part_of(unsigned block, const Picture& picture, const Mean& mean) {
    const unsigned edge_bands = (picture.out_rows + mean.edge_band_rows - 1) / mean.edge_band_rows, edges = min(picture.tiles, 2);
    const unsigned outer = edges * edge_bands * picture.planes;
    const bool at_edge = block < outer;
    const unsigned across = at_edge ? edges : picture.tiles - edges, bands = at_edge ? edge_bands : picture.bands;
    const unsigned rest = at_edge ? block : block - outer;
    const int height = at_edge ? mean.edge_band_rows : mean.band_rows, y = rest / across % bands * height;
    const int inner = static_cast<int>(rest % across) + (at_edge ? 0 : 1);
    const int x = (at_edge && inner == 1 ? picture.tiles - 1 : inner) * mean.outputs;
    return {x, min(x + mean.outputs, picture.out_row_samples), y, min(y + height, picture.out_rows), rest / across / bands};
}

// The samples that the part's windows see, and `margin` more on the left.
template <typename Sample, int CHANNELS, int ROWS>
__device__ inline Strip<Sample, ROWS> strip_of(const Sample* in, const Part& part, const Picture& picture, const Mean& mean,
                                               int margin) {
    constexpr int SLOTS = Strip<Sample, ROWS>::SLOTS;
    return {in + part.plane * picture.rows * picture.row_samples, picture.row_samples,
            part.x + picture.centre_x - mean.before_x * CHANNELS - margin,
            part.x_end - part.x + (mean.taps_x - 1) * CHANNELS + margin,
            part.y_begin + picture.centre_y - mean.before_y - 1, mean.taps_y, (mean.taps_y + SLOTS - 1) / SLOTS};
}

// The place of the part's first result.
template <typename Sample>
__device__ inline Sample* first_of(Sample* out, const Part& part, const Picture& picture) {
    return out + (part.plane * picture.out_rows + part.y_begin) * picture.out_row_samples + part.x;
}

// WORDS: of a row that a lane sums, preferably odd, so that lanes read from different banks; ROWS: of a step.
template <typename Sample, int CHANNELS, int WORDS, int ROWS, int TEAMS>
__global__ void __launch_bounds__(32 * TEAMS, 1)
box_running(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Mean mean) {
    constexpr int BYTES = sizeof(Sample), A_WORD = 4 / BYTES, SLOTS = 2 * ROWS;
    constexpr int SAMPLES = WORDS * A_WORD, QUADS = (SAMPLES + 3) / 4;
    static_assert(SAMPLES % CHANNELS == 0, "a lane has whole pixels");
    extern __shared__ __align__(32) unsigned char shared[];
    __shared__ __align__(8) unsigned long long arrivals[TEAMS][STAGES];
    __shared__ __align__(16) uint4 passed[QUADS][32];  // each lane's sums, from team to team
    __shared__ Beyond beyond;
    __shared__ Turns<TEAMS> turns;
    const int teams = blockDim.x / 32;
    const int team = opaque(static_cast<int>(threadIdx.x / 32)), lane = opaque(static_cast<int>(threadIdx.x % 32));
    const Part part = part_of(blockIdx.x, picture, mean);
    const int height = part.y_end - part.y_begin, distance = mean.taps_x * CHANNELS;
    Sample* out_tile = first_of(out, part, picture);
    const auto strip = strip_of<Sample, CHANNELS, ROWS>(in, part, picture, mean, CHANNELS);
    const int steps = strip.warm + (height + ROWS - 1) / ROWS;
    // Of the team: its ring of rows and the results of a step.
    unsigned char* ring = shared + team * (STAGES * SLOTS * mean.pitch + ROWS * 128 * WORDS);
    unsigned* results = reinterpret_cast<unsigned*>(ring + STAGES * SLOTS * mean.pitch);

    Feed<Sample, CHANNELS, ROWS> feed(strip, picture, beyond, ring, arrivals[team], mean.pitch, steps, team, lane);
    beyond.fill<CHANNELS>(strip, picture);
    turns.begin(team, lane);
    for (int i = threadIdx.x; i < QUADS * 4 * 32; i += blockDim.x) reinterpret_cast<unsigned*>(passed)[i] = mean.initial;
    __syncthreads();
    const bool alike = picture.row_samples % A_WORD == 0;
    const int left_byte = strip.skew(0) * BYTES % 4;

    feed.ask(0);
#pragma unroll 1
    for (unsigned turn = 0;; ++turn) {
        const int step = turn * teams + team;
        if (step >= steps) break;
        const bool warming = step < strip.warm;
        unsigned char* taken[SLOTS];
        feed.take(turn, taken);
        unsigned change[ROWS][SAMPLES], total[ROWS * CHANNELS], before[ROWS * CHANNELS];
        int first_window[ROWS * CHANNELS];  // the change of the window before the tile's first output
        const unsigned weights = warming ? 0x0101u : 0xFF01u, opposite = warming ? 0xFFFFu : 0x01FFu;
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const unsigned char *entering = taken[2 * k], *leaving = taken[2 * k + 1];
            unsigned(&sums)[CHANNELS] = reinterpret_cast<unsigned(&)[CHANNELS]>(total[k * CHANNELS]);
            const int own = lane * SAMPLES * BYTES;
            window_changes<Sample, CHANNELS>(change[k], sums, entering + own, leaving + own, distance * BYTES, weights, opposite,
                                             alike, left_byte);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) first_window[k * CHANNELS + c] = 0;
            const int sign = warming ? 1 : -1;
#pragma unroll 1
            for (int tap = lane * CHANNELS; tap < distance; tap += 32 * CHANNELS)
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    first_window[k * CHANNELS + c] += reinterpret_cast<const Sample*>(entering)[tap + c] +
                                                      sign * reinterpret_cast<const Sample*>(leaving)[tap + c];
        }
        scan(before, total);
#pragma unroll
        for (int i = 0; i < ROWS * CHANNELS; ++i) before[i] += warp_sum(first_window[i]);

        // The sums go from team to team. As much as possible is added before the turn comes, since the others wait for it.
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j)
                change[k][j] += before[k * CHANNELS + j % CHANNELS] + (k > 0 ? change[max(k - 1, 0)][j] : 0);
        if (teams > 1 && step > 0) turns.await(team, turn);
        uint4 held[QUADS], next[QUADS];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) next[i] = held[i] = passed[i][lane];
        const unsigned(&sum)[SAMPLES] = reinterpret_cast<unsigned(&)[SAMPLES]>(held);
        unsigned(&next_sum)[SAMPLES] = reinterpret_cast<unsigned(&)[SAMPLES]>(next);
#pragma unroll
        for (int j = 0; j < SAMPLES; ++j) next_sum[j] = sum[j] + change[ROWS - 1][j];
#pragma unroll
        for (int i = 0; i < QUADS; ++i) passed[i][lane] = next[i];
        if (teams > 1 && step + 1 < steps) turns.pass_on(team, teams);
        if (warming) continue;

        wait_for_bulk_stores();
        __syncwarp();  // the last turn's results have been read
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
#pragma unroll
            for (int j = 0; j < SAMPLES; ++j)
                change[k][j] = __umulhi(k + 1 < ROWS ? sum[j] + change[k][j] : next_sum[j], mean.multiplier);
            pack_row<Sample, WORDS>(results + (32 * k + lane) * WORDS, change[k], mean.shift);
        }
        fence_bulk_copies();
        __syncwarp();
        const int y = (step - strip.warm) * ROWS;
#pragma unroll 1
        for (int k = 0; k < min(ROWS, height - y); ++k)
            store_row(out_tile + (y + k) * static_cast<long long>(picture.out_row_samples),
                      results + 32 * k * WORDS, part.x_end - part.x, picture.aligned_out, lane);
    }
    wait_for_bulk_stores();  // before the block's shared memory is freed
}
