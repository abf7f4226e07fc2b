// Gaussians of 16-bit samples along both axes at once, on tensor cores. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shifted.cuh"

// words: kernels/smoothing/words.py defines the sums, which are exact, and has their names. As in `tensor`, sums are products
// with banded matrices of weights, and a block walks along a strip of rows, its warps one below the other. A warp sums all
// channels of 16 rows: down the columns, the two bytes of each sample are neighbours of the depth of a product, and the
// weights are the left factor; results v are in the lanes where the next products need their left factors, four positions of
// one of their bytes in a word. Products of one order (of 2^16, 2^8 and 1) are added to what those of the order before gave,
// shifted. So samples and results pass through shared memory once each.
//
// Who waits for whom, chunk by chunk of positions:
//
//   copies of chunk i + 1 .............. slot of chunk i - 1    (asynchronous, during the sums of chunk i)
//   barrier                              chunk i is in its slot, and all warps have summed chunk i - 1
//   each warp, 16 positions at a time: slot -> sums down -> registers -> sums across -> its results
//     |  its lanes wait for each other before and after
//   each warp: results -> memory
//
// Across, a warp keeps its last SEEN blocks of sums down in registers, and moves each to the place of the block before. With
// weights that take turns instead, as in `tensor`, the loop has SEEN times the instructions, which leave the cache.
//
// Floors for N = 8192 x 8192 x 3 samples of 16 bits on an H200 (4.2 TB/s; mma.sync measured at 612 T multiply-adds/s of
// bytes, of which products of half the depth take as long), for reaches of 8, 16, 24 and 32:
//   bytes         4 N                                                     192 us
//   products      N times 352, 576, 704 and 928 multiply-adds             116 us, 190 us, 232 us, 305 us
//   instructions  127 M and 143 M of warps (ncu, reaches of 8 and 16)    135 us, 152 us
// Measured for reaches of 8, 16 and 24: 289, 380 and 499 us; unaligned rows (8191 x 8192) 379, 468 and 618.
// Source: our own; the banded products are those of `tensor`.

constexpr int WORDS_WARPS = 4, WORDS_THREADS = 32 * WORDS_WARPS, WORDS_ROWS = 16 * WORDS_WARPS;
constexpr int WORDS_REACH = 32;  // maximum

struct WordsAxis {  // weights at distance 0 …, by their bytes: 2^16 of `top`, 2^8 of `middle` and `low`
    signed char top[WORDS_REACH + 1], middle[WORDS_REACH + 1], low[WORDS_REACH + 1];
};

struct WordsFilter {
    WordsAxis y, x;
    int bias_y, finer_y, bias_x, finer_x;
    unsigned middle;  // 2^15 in both halves if samples are signed, which makes them unsigned
};

// Where rows begin: at multiples of 16 bytes, at words, in the middle of words, or every other one in the middle.
enum WordsRows { ALIGNED_ROWS, EVEN_ROWS, ODD_ROWS, MIXED_ROWS };

template <int CHANNELS, int RADIUS, int ROWS>
struct Words {
    static constexpr bool ALIGNED = ROWS == ALIGNED_ROWS;
    static constexpr int REACH = RADIUS;
    static constexpr int SEEN = (16 + 2 * RADIUS) / 16;  // blocks of 16 positions that 16 neighbouring windows see
    static constexpr bool FAR = SEEN > 3;
    // Blocks on a multiprocessor, as registers and shared memory allow.
    static constexpr int BLOCKS = FAR ? 2 : 6 - SEEN - (CHANNELS == 4);
    static constexpr int SEEN_ROWS = WORDS_ROWS + 16 * (SEEN - 1);
    static constexpr int CHUNK = 16 * SEEN, CHUNK_BYTES = CHUNK * CHANNELS * 2;  // positions, and bytes of a row
    static constexpr int A_ROW = CHUNK_BYTES / 16, VECTORS = A_ROW + !ALIGNED, SLOT = VECTORS * 16;
    // Rows two apart start 8 banks apart; rows of results so that eight lanes use different banks.
    static constexpr int PITCH = (2 * VECTORS | 1) * 16;
    static constexpr int OUT_ROW = 2 * CHANNELS;  // vectors of 16 positions, which are written at once
    static constexpr int CARRIED = ALIGNED ? 0 : SECTOR_BYTES;  // in front of them: what filled no sector before
    static constexpr int APART = !ALIGNED ? 3 : CHANNELS == 4 ? 4 : CHANNELS == 2 ? 2 : 1;
    static constexpr int RESULT_PITCH = (OUT_ROW + APART) * 16;
    static constexpr int RESULTS = 16 * RESULT_PITCH;
    static constexpr int SHARED_BYTES = SEEN_ROWS * (PITCH + 4) + WORDS_WARPS * RESULTS;
};

// d += a b: a is 16 x 32 of signed bytes, b 32 x 8 of unsigned ones, or the reverse; or of half that depth.
#if __CUDA_ARCH__ >= 800
#define MILLRACE_WORD_PRODUCTS(NAME, A, B)                                                                              \
    __device__ inline void NAME(int (&d)[4], const unsigned* a, unsigned b0, unsigned b1) {                             \
        asm("mma.sync.aligned.m16n8k32.row.col.s32." A "." B                                                            \
            ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                      \
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                            \
    }                                                                                                                   \
    __device__ inline void NAME(int (&d)[4], const unsigned* a, unsigned b) {                                           \
        asm("mma.sync.aligned.m16n8k16.row.col.s32." A "." B ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                            \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                                            \
    }
#else
#define MILLRACE_WORD_PRODUCTS(NAME, A, B)                                                                              \
    __device__ inline void NAME(int (&d)[4], const unsigned* a, unsigned b) {                                           \
        for (int i = 0; i < 2; ++i)                                                                                     \
            asm("mma.sync.aligned.m8n8k16.row.col.s32." A "." B ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};"                  \
                : "+r"(d[2 * i]), "+r"(d[2 * i + 1])                                                                    \
                : "r"(a[i]), "r"(b));                                                                                   \
    }                                                                                                                   \
    __device__ inline void NAME(int (&d)[4], const unsigned* a, unsigned b0, unsigned b1) {                             \
        NAME(d, a, b0);                                                                                                 \
        NAME(d, a + 2, b1);                                                                                             \
    }
#endif
MILLRACE_WORD_PRODUCTS(signed_by_bytes, "s8", "u8")
MILLRACE_WORD_PRODUCTS(bytes_by_signed, "u8", "s8")
#undef MILLRACE_WORD_PRODUCTS

// The last address at or below `at` that is a multiple of 16 bytes.
template <typename Sample>
__device__ inline Sample* aligned_below(Sample* at) {
    return reinterpret_cast<Sample*>(reinterpret_cast<unsigned long long>(at) / 16 * 16);
}

// How a block fetches chunks: each thread copies one vector of every AT_ONCE rows. Rows that are not aligned are copied
// from the vector on in which they begin, so rows 8 apart are shifted alike; those beyond an edge are shifted as a row
// inside would be. Samples beyond the ends of rows are copied one by one, those of several rows at once.
template <typename Shape, int CHANNELS, bool ALIGNED>
struct WordsInput {
    static constexpr int AT_ONCE = WORDS_THREADS / Shape::VECTORS;
    static constexpr int SPAN = Shape::REACH + (ALIGNED ? 0 : 16);  // positions that may not be in whole vectors
    unsigned char* samples;
    const unsigned short* plane;
    const int* rows;  // of the plane; -1: beyond the edge
    const Picture& picture;
    int first;    // row, which may lie outside
    bool inside;  // all rows lie inside
    int to;       // of the thread's vector in a row of `samples`; -1: this thread has none

    __device__ WordsInput(unsigned char* samples, const unsigned short* plane, const int* rows, int first,
                          const Picture& picture)
        : samples(samples), plane(plane), rows(rows), picture(picture), first(first) {
        inside = first >= 0 && first + Shape::SEEN_ROWS <= picture.rows;
        const int row = threadIdx.x / Shape::VECTORS, at = threadIdx.x % Shape::VECTORS * 16;
        to = opaque(row < AT_ONCE ? row * Shape::PITCH + at : -1);
    }

    __device__ const unsigned short* start_of(int row, int x) const {
        return plane + row * static_cast<long long>(picture.row_samples) + x * CHANNELS;
    }

    // The chunk whose first position is `x`, into a slot that begins at byte `slot` of each row.
    __device__ void fetch(int x, int slot) const {
        const int begin = x * CHANNELS, end = begin + Shape::CHUNK * CHANNELS;
        constexpr int BESIDE = ALIGNED ? 0 : 8;  // samples that are copied beside it
        if (!inside || begin < BESIDE || end + BESIDE > picture.row_samples) return fetch_vectors(x, slot);
        if (to < 0) return;
        const int row = threadIdx.x / Shape::VECTORS, at = threadIdx.x % Shape::VECTORS * 16;
        constexpr int LAST = Shape::SEEN_ROWS % AT_ONCE * Shape::PITCH;  // only rows before this have one more to do
        if (ALIGNED) {
            const unsigned char* source = reinterpret_cast<const unsigned char*>(start_of(first + row, x)) + at;
            const long long stride = 2 * AT_ONCE * static_cast<long long>(picture.row_samples);
#pragma unroll
            for (int i = 0; i < Shape::SEEN_ROWS; i += AT_ONCE, source += stride)
                if (i + AT_ONCE <= Shape::SEEN_ROWS || to < LAST)
                    copy_16_bytes<256>(samples + to + slot + i * Shape::PITCH, source);
            return;
        }
        const unsigned short* source = start_of(first + row, x);
        const long long stride = AT_ONCE * static_cast<long long>(picture.row_samples);
#pragma unroll 4
        for (int i = 0; i < Shape::SEEN_ROWS; i += AT_ONCE, source += stride)
            if (i + AT_ONCE <= Shape::SEEN_ROWS || to < LAST)
                copy_16_bytes<256>(samples + to + slot + i * Shape::PITCH, aligned_below(source) + at / 2);
    }

    // The same if part of it lies beyond an edge.
    __device__ void fetch_vectors(int x, int slot) const {
        const unsigned fill = picture.fill * 0x10001u;
        const int first_row = threadIdx.x / Shape::VECTORS, at = threadIdx.x % Shape::VECTORS * 8;
        if (to >= 0)
#pragma unroll 1
            for (int row = first_row; row < Shape::SEEN_ROWS; row += AT_ONCE) {
                const int line = rows[row], sample = x * CHANNELS + at - shift_of(row, x);
                uint4* vector = reinterpret_cast<uint4*>(samples + to + slot + (row - first_row) * Shape::PITCH);
                if (line < 0) *vector = make_uint4(fill, fill, fill, fill);
                else if (!whole(row, sample)) continue;
                else if (ALIGNED || line == first + row) copy_16_bytes<256>(vector, start_of(line, 0) + sample);
                else *vector = load_anywhere(start_of(line, 0) + sample);
            }
#pragma unroll 1
        for (int end = 0; end < 2; ++end)
            fetch_positions(x, slot, end == 0 ? -Shape::REACH : picture.columns + Shape::REACH - SPAN);
    }

    // Samples by which a row is shifted in `samples`.
    __device__ int shift_of(int row, int x) const {
        const unsigned start = static_cast<unsigned>(reinterpret_cast<unsigned long long>(plane)) / 2;
        return ALIGNED ? 0 : (start + static_cast<unsigned>(first + row) * picture.row_samples + x * CHANNELS) % 8;
    }

    // Whether a vector that begins at `sample` of a row is copied as such.
    __device__ bool whole(int row, int sample) const {
        const int beside = ALIGNED || rows[row] == first + row ? 0 : 8;  // samples that are read with it
        return sample >= beside && sample + 8 + beside <= picture.row_samples;
    }

    // Of SPAN positions from `begin` on, the samples in vectors that are not: a thread copies a position of every AT_ONCE rows.
    __device__ void fetch_positions(int x, int slot, int begin) const {
        constexpr int AT_ONCE = WORDS_THREADS / SPAN;
        const int position = begin + static_cast<int>(threadIdx.x % SPAN), at = (position - x) * CHANNELS;
        if (at < 0 || at >= Shape::CHUNK * CHANNELS || threadIdx.x >= AT_ONCE * SPAN) return;
        const int from = border_index(position, picture.columns, picture.mode_x);
#pragma unroll 4
        for (int row = threadIdx.x / SPAN; row < Shape::SEEN_ROWS; row += AT_ONCE) {
            const int line = rows[row], shift = shift_of(row, x);
            unsigned short* to = reinterpret_cast<unsigned short*>(samples + row * Shape::PITCH + slot) + at + shift;
            const unsigned short* source = start_of(max(line, 0), max(from, 0));
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const int vector = (at + c + shift) / 8 * 8 - shift + x * CHANNELS;
                const unsigned short sample = from < 0 ? picture.fill : __ldg(source + c);
                if (line >= 0 && !whole(row, vector)) to[c] = sample;
            }
        }
    }
};

// How a warp writes its 16 rows of 16 positions: each lane writes one vector of every AT_ONCE rows.
template <typename Shape, int CHANNELS, bool ALIGNED>
struct WordsOutput {
    static constexpr int AT_ONCE = 32 / Shape::OUT_ROW;  // rows
    unsigned char* results;
    unsigned short* out;  // the warp's first row
    int rows;             // to write
    long long stride;
    int from;            // of the lane's vector in `results`; -1: this lane has none
    unsigned short* to;  // and in memory, at position 0

    __device__ WordsOutput(unsigned char* results, unsigned short* out, int rows, long long stride)
        : results(results), out(out), rows(rows), stride(stride) {
        const int row = threadIdx.x % 32 / Shape::OUT_ROW, at = threadIdx.x % 32 % Shape::OUT_ROW * 8;
        from = opaque(row < AT_ONCE ? row * Shape::RESULT_PITCH + 2 * at : -1);
        to = reinterpret_cast<unsigned short*>(opaque(reinterpret_cast<unsigned long long>(out + row * stride + at)));
    }

    // Writes at most `positions` from position `x` on, which may be the block's first.
    __device__ void store(int x, int positions, bool) const {
        if (rows < 16 || positions < 16) return store_ends(x, min(positions, 16));
        if (from < 0) return;
        unsigned short* line = to + x * CHANNELS;
        constexpr int LAST = 16 % AT_ONCE * Shape::RESULT_PITCH;  // only rows before this have one more to do
#pragma unroll
        for (int i = 0; i < 16; i += AT_ONCE, line += AT_ONCE * stride)
            if (i + AT_ONCE <= 16 || from < LAST)
                store_16_bytes(line, *reinterpret_cast<const uint4*>(results + from + i * Shape::RESULT_PITCH));
    }

    // The same at the ends of rows, whose samples fill whole vectors.
    __device__ void store_ends(int x, int positions) const {
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < 16 * Shape::OUT_ROW; i += 32) {
            const int row = i / Shape::OUT_ROW, at = i % Shape::OUT_ROW * 8;
            if (row < rows && at < positions * CHANNELS)
                store_16_bytes(out + row * stride + x * CHANNELS + at,
                               *reinterpret_cast<const uint4*>(results + row * Shape::RESULT_PITCH + 2 * at));
        }
    }
};

// The same for unaligned rows, which are shifted when they are written, in whole sectors: each lane writes one half of all
// sectors of a row. What fills none waits in front of the next positions.
template <typename Shape, int CHANNELS>
struct WordsOutput<Shape, CHANNELS, false> {
    unsigned char* result;  // the lane's row, from its half of the first sector on
    unsigned short* line;   // the row in memory, at position 0
    bool writes;            // whether the row exists
    int half;               // bytes

    __device__ WordsOutput(unsigned char* results, unsigned short* out, int rows, long long stride) {
        const int row = threadIdx.x % 16;
        half = threadIdx.x & 16;
        result = results + opaque(row * Shape::RESULT_PITCH + Shape::CARRIED + half);
        line = reinterpret_cast<unsigned short*>(opaque(reinterpret_cast<unsigned long long>(out + row * stride)));
        writes = row < rows;
    }

    // The position `x` may be the block's first.
    __device__ void store(int x, int positions, bool first) const {
        unsigned short* begin = line + x * CHANNELS;
        const unsigned past = reinterpret_cast<unsigned long long>(begin) % SECTOR_BYTES;
        if (positions <= 16 || first) {
            const int samples = past / 2, end = positions > 16 ? Shape::OUT_ROW * 8 - samples : positions * CHANNELS;
            store_ends(begin, first ? 0 : -samples, end);
        } else if (writes) {
            const unsigned char* source = result - (past + 2) / 4 * 4;
            unsigned char* target = reinterpret_cast<unsigned char*>(begin) - past + half;
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                const unsigned* words = reinterpret_cast<const unsigned*>(source + SECTOR_BYTES * i);
                unsigned word[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) word[k] = __funnelshift_r(words[k], words[k + 1], past * 8);
                store_16_bytes(target + SECTOR_BYTES * i, make_uint4(word[0], word[1], word[2], word[3]));
            }
        }
        __syncwarp();
        uint4* carried = reinterpret_cast<uint4*>(result - Shape::CARRIED);
        *carried = carried[Shape::OUT_ROW];
    }

    // Samples `first` … `last` of the row, one by one.
    __device__ void store_ends(unsigned short* to, int first, int last) const {
        const unsigned short* from = reinterpret_cast<const unsigned short*>(result - half);
#pragma unroll 4
        for (int i = first + half / 16; i < last; i += 2)
            if (writes) to[i] = from[i];
    }
};

template <int CHANNELS, int RADIUS, int ROWS>
__global__ void __launch_bounds__(WORDS_THREADS, Words<CHANNELS, RADIUS, ROWS>::BLOCKS)
words(const unsigned short* __restrict__ in, unsigned short* __restrict__ out, Picture picture,
      const __grid_constant__ WordsFilter filter, BlockPartition tiles) {
    typedef Words<CHANNELS, RADIUS, ROWS> Shape;
    constexpr bool ALIGNED = Shape::ALIGNED;
    constexpr int SEEN = Shape::SEEN, CHUNK = Shape::CHUNK;
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* samples = shared;
    int* rows = reinterpret_cast<int*>(shared + Shape::SEEN_ROWS * Shape::PITCH);  // -1: beyond the edge
    unsigned char* all_results = shared + Shape::SEEN_ROWS * (Shape::PITCH + 4);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    unsigned char* results = all_results + warp * Shape::RESULTS;

    const Place area = place_in_strips(blockIdx.x, picture);
    const unsigned short* in_plane = in + area.plane * picture.rows * picture.row_samples;
    const int y = area.band * WORDS_ROWS, warp_y = y + 16 * warp;
    const int x_begin = tiles.begin(area.tile), x_end = min(tiles.begin(area.tile + 1), picture.out_row_samples / CHANNELS);
    const int first = y + picture.centre_y - RADIUS;
    for (int i = threadIdx.x; i < Shape::SEEN_ROWS; i += WORDS_THREADS)
        rows[i] = border_index(first + i, picture.rows, picture.mode_y);

    // Bytes of the weights of all distances that a factor may have, 0 past RADIUS; here since lanes read different ones.
    constexpr int BAND = 2 * RADIUS + 40;
    for (int i = threadIdx.x; i < 6 * BAND; i += WORDS_THREADS) {
        const int distance = abs(i % BAND - RADIUS - 15);
        const unsigned char* half = reinterpret_cast<const unsigned char*>(&filter) + i / BAND * (WORDS_REACH + 1);
        all_results[i] = distance <= RADIUS ? half[distance] : 0;
    }
    __syncthreads();
    const auto four = [&](int limb, int distance) {  // bytes from this distance on
        const int at = limb * BAND + distance + RADIUS + 15;
        const unsigned* words = reinterpret_cast<const unsigned*>(all_results) + at / 4;
        return __funnelshift_r(words[0], words[1], at % 4 * 8);
    };

    // Left factors, down: the weights of the two bytes of rows k and k + 1 for result m, or of the high bytes of four rows.
    // Right factors, across: of four positions for result n; results are ordered so that a lane gets four neighbours. They are
    // the same for all warps, and each computes a quarter of them: [word / 4][lane][word % 4], 16 words of each block.
#pragma unroll 1
    for (int word = warp; word < 16 * SEEN; word += WORDS_WARPS) {
        const int kind = word % 16, ahead = word / 16 * 16 + 2 * place - group - RADIUS;
        unsigned factor;
        if (kind < 8) {
            const int row = ahead + kind / 2 % 2 * 8 - kind % 2 * 8;
            factor = __byte_perm(four(kind / 4, row), four(kind / 4 + 1, row), 0x5140);
        } else if (kind < 10) {
            const int row = ahead - (kind - 8) * 8;
            factor = __byte_perm(four(0, row), four(0, row + 8), 0x5410);
        } else {
            factor = four(kind / 2 - 2, ahead + 2 * place + group - (group / 2 * 4 + kind % 2 * 2 + group % 2));
        }
        reinterpret_cast<unsigned*>(samples)[(word / 4 * 32 + lane) * 4 + word % 4] = factor;
    }
    __syncthreads();
    unsigned top[SEEN][2], down[SEEN][2][4], across[3][2][SEEN];
#pragma unroll
    for (int block = 0; block < SEEN; ++block) {
        const uint4* words = reinterpret_cast<const uint4*>(samples) + 128 * block + lane;
        const uint4 first = words[0], second = words[32], third = words[64], fourth = words[96];
        down[block][0][0] = first.x, down[block][0][1] = first.y, down[block][0][2] = first.z, down[block][0][3] = first.w;
        down[block][1][0] = second.x, down[block][1][1] = second.y, down[block][1][2] = second.z, down[block][1][3] = second.w;
        top[block][0] = third.x, top[block][1] = third.y, across[0][0][block] = third.z, across[0][1][block] = third.w;
        across[1][0][block] = fourth.x, across[1][1][block] = fourth.y, across[2][0][block] = fourth.z, across[2][1][block] = fourth.w;
    }
    grid_dependency_synchronize();
    __syncthreads();

    const WordsInput<Shape, CHANNELS, ALIGNED> input(samples, in_plane, rows, first, picture);
    unsigned short* warp_out = out + (area.plane * picture.out_rows + warp_y) * picture.out_row_samples;
    const WordsOutput<Shape, CHANNELS, ALIGNED> output(results, warp_out, picture.out_rows - warp_y, picture.out_row_samples);

    // Where the lane's samples begin in a slot: rows 2 `place` and the next, of positions 2 `group` and the next. Rows that begin
    // in the middle of a word need one more; of mixed rows these are the second. `selector` puts the two in order.
    constexpr int MORE[2] = {ROWS == ODD_ROWS, ROWS == ODD_ROWS || ROWS == MIXED_ROWS};
    const int lane_row = 16 * warp + 2 * place, x_first = x_begin + picture.centre_x / CHANNELS - RADIUS - 16;
    const bool swapped = ROWS == MIXED_ROWS && input.shift_of(lane_row, x_first) % 2;
    unsigned selector[2] = {ROWS == ODD_ROWS ? 0x7632u : 0x5410u, ROWS == ODD_ROWS ? 0x5410u : 0x7632u};
    if (ROWS == MIXED_ROWS) selector[0] = swapped ? 0x1076u : 0x7610u, selector[1] = swapped ? 0x3254u : 0x5432u;
    int from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = lane_row + (swapped ? 1 - i : i);
        from[i] = opaque(row * Shape::PITCH + (2 * group * CHANNELS + input.shift_of(row, x_first) / 2 * 2) * 2);
    }
    const unsigned flip = filter.middle;
    const int bias_y = filter.bias_y, finer_y = filter.finer_y, bias_x = filter.bias_x, finer_x = filter.finer_x;

    // The bytes of v, from the highest on, as left factors of depth 32: of two blocks each; of the last of an odd number, the
    // upper two bytes.
    constexpr int PAIRS = SEEN / 2, ODD = SEEN % 2;
    unsigned quads[CHANNELS][3 * PAIRS + 2 * ODD][4];
    // After products of each order, from the highest on: makes room for the next. Weights finer than 2^-24 give more than 32
    // bits, of which the lowest are dropped.
    const auto combine = [](int& sum, int& high, int order, int bias, int finer) {
        if (order == 0 && !Shape::FAR) sum <<= 8;
        if (order == 0 && Shape::FAR) high = sum << (16 - finer), sum = 0;
        if (order == 1) sum = sum * 256 + bias;
        if (order == 2 && Shape::FAR) sum = high + (sum >> finer);
    };
    const auto part_of = [&](int c, int limb, int block, int row) -> unsigned& {
        if (block < 2 * PAIRS) return quads[c][limb * PAIRS + block / 2][block % 2 * 2 + row];
        return quads[c][3 * PAIRS + limb / 2][limb % 2 * 2 + row];
    };
    // Sums 16 columns of all channels down, from byte `at` of a row on, as the last block.
    const auto sum_down = [&](int at) {
        unsigned columns[2][CHANNELS][SEEN][2];  // pairs of rows, by the first or second position
#pragma unroll
        for (int block = 0; block < SEEN; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned words[2][CHANNELS + 1];
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const unsigned char* begin = samples + from[row] + at + (16 * block + 8 * half) * Shape::PITCH;
#pragma unroll
                    for (int i = 0; i < CHANNELS + MORE[row]; ++i)
                        words[row][i] = reinterpret_cast<const unsigned*>(begin)[i];
                }
#pragma unroll
                for (int i = 0; i < CHANNELS; ++i) {
                    columns[2 * i / CHANNELS][2 * i % CHANNELS][block][half] =
                        __byte_perm(words[0][i], words[1][i], selector[0]);
                    columns[(2 * i + 1) / CHANNELS][(2 * i + 1) % CHANNELS][block][half] =
                        __byte_perm(words[0][i + MORE[0]], words[1][i + MORE[1]], selector[1]);
                }
            }
        if (flip != 0)
#pragma unroll
            for (int i = 0; i < 4 * CHANNELS * SEEN; ++i)
                columns[i / 2 / SEEN / CHANNELS][i / 2 / SEEN % CHANNELS][i / 2 % SEEN][i % 2] ^= flip;
        int sum[CHANNELS][2][4] = {}, high[CHANNELS][2][4] = {};
#pragma unroll
        for (int limb = 0; limb < 3; ++limb) {
#pragma unroll
            for (int block = 0; block < SEEN; ++block) {
                if (limb == 0 && block % 2 == 1) continue;
                const unsigned(&factor)[4] = down[block][limb > 0 ? limb - 1 : 0];
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const auto upper = [&](int k) { return __byte_perm(columns[i][c][k][0], columns[i][c][k][1], 0x7531); };
                        const unsigned* alone = &top[0][0] + 2 * block;
                        if (limb > 0) signed_by_bytes(sum[c][i], factor, columns[i][c][block][0], columns[i][c][block][1]);
                        else if (block + 1 < SEEN) signed_by_bytes(sum[c][i], alone, upper(block), upper(block + 1));
                        else signed_by_bytes(sum[c][i], alone, upper(block));
                    }
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    combine(sum[c][i / 4][i % 4], high[c][i / 4][i % 4], limb, bias_y, finer_y);
                }
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const auto pair_of = [&](int k, int bytes) {
                    return __byte_perm(sum[c][0][2 * row + k], sum[c][1][2 * row + k], bytes);
                };
                const unsigned one = pair_of(0, 0x7362), other = pair_of(1, 0x7362);
                const unsigned low = __byte_perm(pair_of(0, 0x5151), pair_of(1, 0x5151), 0x5410) & 0xFEFEFEFEu;
                const unsigned bytes[3] = {__byte_perm(one, other, 0x7632), __byte_perm(one, other, 0x5410), low};
#pragma unroll
                for (int k = 0; k < 3; ++k) {
#pragma unroll
                    for (int block = 0; block + 1 < SEEN; ++block) part_of(c, k, block, row) = part_of(c, k, block + 1, row);
                    part_of(c, k, SEEN - 1, row) = bytes[k];
                }
            }
    };

    unsigned char* result = results + opaque(group * Shape::RESULT_PITCH + Shape::CARRIED + 8 * place * CHANNELS);
    // Sums 16 positions of all channels along their rows.
    const auto sum_across = [&] {
        int sum[CHANNELS][2][4] = {}, high[CHANNELS][2][4] = {};
#pragma unroll
        for (int order = 0; order < 3; ++order)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const auto factor = [&](int limb, int block) { return across[limb][part][block]; };
#pragma unroll
                    for (int k = 0; k <= order; ++k)
#pragma unroll
                        for (int pair = 0; pair < PAIRS; ++pair)
                            bytes_by_signed(sum[c][part], quads[c][k * PAIRS + pair], factor(order - k, 2 * pair),
                                            factor(order - k, 2 * pair + 1));
                    if constexpr (ODD) {
                        const unsigned(*last)[4] = &quads[c][3 * PAIRS];
                        if (order == 0) bytes_by_signed(sum[c][part], last[0], factor(0, SEEN - 1));
                        else bytes_by_signed(sum[c][part], last[0], factor(order, SEEN - 1), factor(order - 1, SEEN - 1));
                        if (order == 2) bytes_by_signed(sum[c][part], last[1], factor(0, SEEN - 1));
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        combine(sum[c][part][i], high[c][part][i], order, bias_x, finer_x);
                    }
                }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const auto value = [&](int k) { return sum[k % CHANNELS][k / CHANNELS / 2][2 * row + k / CHANNELS % 2]; };
            unsigned char* to = result + 8 * row * Shape::RESULT_PITCH;
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                unsigned word[2];
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    word[k] = __byte_perm(value(4 * i + 2 * k), value(4 * i + 2 * k + 1), 0x7632) ^ (Shape::FAR ? flip : 0);
                reinterpret_cast<uint2*>(to)[i] = make_uint2(word[0], word[1]);
            }
        }
    };

    // The first turn only fetches, the second only sums the blocks that the first windows see.
    int slot = Shape::SLOT;
#pragma unroll 1
    for (int x = x_begin - 2 * CHUNK; x < x_end; x += CHUNK) {
        wait_for_copies();
        __syncthreads();  // this turn's chunk is visible, and the last turn's has been read
        if (x + CHUNK < x_end) input.fetch(x + 2 * CHUNK + x_first - x_begin, Shape::SLOT - slot);
#pragma unroll 1
        for (int phase = x >= x_begin ? 0 : x == x_begin - CHUNK ? 1 : SEEN; phase < SEEN; ++phase) {
            sum_down(slot + 32 * phase * CHANNELS);
            if (x < x_begin) continue;
            sum_across();
            __syncwarp();
            if (x + 16 * phase < x_end) output.store(x + 16 * phase, x_end - x - 16 * phase, x + phase == x_begin);
            __syncwarp();
        }
        slot = Shape::SLOT - slot;
    }
}

struct WordsWeights {
    int upper[WORDS_REACH + 1], lower[WORDS_REACH + 1], top[WORDS_REACH + 1], bias, shift;  // by distance
    unsigned middle;                                                                        // 2^15 if samples are signed
};

// Calls each(distance, sample) for the window of result i along `axis`.
template <typename Sample, typename Each>
__device__ inline void for_window(const Sample* __restrict__ in, const Axis& axis, long long i, Sample fill, Each each) {
    const long long column = i % axis.inner, row = i / axis.inner;
    const Sample* line = in + row / axis.out_length * axis.length * axis.inner + column;
    const long long centre = row % axis.out_length + (axis.mode == VALID ? axis.before : 0);
    for (int k = -axis.before; k <= axis.before; ++k) {
        const long long from = border_index(centre + k, axis.length, axis.mode);
        each(abs(k), from < 0 ? fill : line[from * axis.inner]);
    }
}

// words_down, words_across: the definition, one thread per sum, one axis per pass, for images that `words` does not take.
// words_down, bytes_across: that of bytes (kernels/smoothing/byte_sums.py), for images that `tensor` does not take.
template <typename Sample>
__global__ void __launch_bounds__(256)
words_down(const Sample* __restrict__ in, unsigned* __restrict__ sums, Axis axis, Sample fill,
           const __grid_constant__ WordsWeights weights) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        long long sum = weights.bias;
        for_window(in, axis, i, fill, [&](int k, Sample sample) {
            const int x = sample ^ weights.middle;
            sum += static_cast<long long>(weights.upper[k]) * x + weights.lower[k] * (x >> 8);
        });
        sums[i] = static_cast<unsigned>(sum >> weights.shift);
    }
}

__global__ void __launch_bounds__(256)
words_across(const unsigned* __restrict__ sums, unsigned short* __restrict__ out, Axis axis, unsigned fill,
             const __grid_constant__ WordsWeights weights) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        long long sum = weights.bias;
        for_window(sums, axis, i, fill, [&](int k, long long v) {
            sum += weights.upper[k] * (v >> 7) + weights.lower[k] * (v >> 15) + 2 * weights.top[k] * (v & 127);
        });
        out[i] = static_cast<unsigned short>(sum >> weights.shift ^ weights.middle);
    }
}

// Of v, or of samples if only one axis is smoothed.
template <typename Sample>
__global__ void __launch_bounds__(256)
bytes_across(const Sample* __restrict__ in, unsigned char* __restrict__ out, Axis axis, Sample fill,
             const __grid_constant__ WordsWeights weights) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * 256LL + threadIdx.x; i < total; i += gridDim.x * 256LL) {
        unsigned sum = weights.bias;
        for_window(in, axis, i, fill, [&](int k, unsigned sample) {
            const unsigned v = same<Sample, unsigned char> ? sample << 8 : sample;
            sum += weights.upper[k] * (v >> 8) + weights.lower[k] * (v & 255);
        });
        out[i] = static_cast<unsigned char>(sum >> 16);
    }
}
