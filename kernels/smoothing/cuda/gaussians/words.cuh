// Gaussians of 16-bit samples along both axes at once, on tensor cores. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "opaque.cuh"
#include "pdl.cuh"
#include "shifted.cuh"
#include "cuda/gaussians/tensor.cuh"

// words: kernels/smoothing/words.py defines the sums, which are exact, and has their names. As in `tensor`, sums are
// products with banded matrices of weights, and a block walks along a strip of rows. A warp sums one channel of
// 16 ROWS_OF_A_WARP rows: down the columns by products of int8, whose depth is the two bytes of each sample, and across by
// products of float16, for which results of the first product are in the right lanes.
//
// Who waits for whom, chunk by chunk of positions (stage: as in memory; planes: channel by channel):
//
//   copies of chunk i ........................ stage        (asynchronous, during the sums of chunk i - 1)
//   barrier                                    chunk i is in the stage; planes and results of chunk i - 1 are complete
//   all warps: stage -> planes, and results of chunk i - 1 -> memory
//   barrier                                    the stage is free: copies of chunk i + 1 begin
//   each warp: planes -> sums down -> registers -> sums across -> results, 16 positions at a time
//
// Down the columns a warp's samples come from its planes, so it needs only that barrier; across, a warp keeps its last SEEN
// blocks of sums down in registers. Two sets of planes, which save the second barrier, cost more than they gain.
//
// Floors for N = 8192 x 8192 x 3 samples of 16 bits on an H200 (4.2 TB/s; mma.sync measured at 305 T multiply-adds/s of
// float16, and twice as many of int8), for reaches of 16 and 32:
//   bytes         4 N                                                     192 us
//   products      3 N times 48 and 80 along each axis                     187 us, 312 us
//   instructions  some 18 N issued (ncu, reach 16)                        125 us
// Source: our own; the banded products are those of `tensor`.
constexpr int WORDS_REACH = 32;  // maximum

struct WordsFilter {
    signed char u1[WORDS_REACH + 1], u0[WORDS_REACH + 1], f[WORDS_REACH + 1];  // down, by distance: u = 256 u1 + u0
    unsigned short h[WORDS_REACH + 1], l[WORDS_REACH + 1];                     // across, as float16
    int bias, finer;
    unsigned middle;  // 2^15 in both halves if samples are signed: it makes them unsigned, and results signed
};

template <int CHANNELS, int RADIUS, bool ALIGNED>
struct Words {
    static constexpr int SEEN = (16 + 2 * RADIUS + 15) / 16;  // blocks of 16 positions that 16 neighbouring windows see
    static constexpr bool FAR = SEEN > 3;
    static constexpr int ROWS_OF_A_WARP = FAR ? 1 : 2;  // blocks of 16 rows
    // Warps one below the other, and blocks on a multiprocessor, as shared memory and registers allow.
    static constexpr int BANDS = CHANNELS == 1 ? 6 : CHANNELS == 2 ? 3 : CHANNELS == 3 ? 2 : FAR ? 3 : 1;
    static constexpr int BLOCKS = CHANNELS < 4 ? 2 : FAR ? 1 : 3, THREADS = 32 * CHANNELS * BANDS;
    static constexpr int BAND = 16 * ROWS_OF_A_WARP, ROWS = BAND * BANDS, SEEN_ROWS = ROWS + 16 * (SEEN - 1);
    static constexpr int CHUNK = 16 * SEEN, GROUPS = CHUNK / 8;         // positions, and groups of 8
    static constexpr int VECTORS = GROUPS * CHANNELS + !ALIGNED;        // of a row of a chunk
    static constexpr int PITCH = (GROUPS | 1) * 16;                     // bytes of a row of one channel
    static constexpr int STAGE = SEEN_ROWS * VECTORS * 16, PLANES = CHANNELS * SEEN_ROWS * PITCH;
    static constexpr int SHARED_BYTES = SEEN_ROWS * 4 + STAGE + PLANES + CHANNELS * ROWS * PITCH;
};

// d += a b: a is 16 x 16, b 16 x 8, of float16.
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// d += a b: a is 16 x 32, of signed bytes, b 32 x 8, of unsigned ones.
__device__ inline void multiply_add(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}

// Four blocks of 8 x 8 samples, transposed; lane i has the address of row i % 8 of block i / 8.
__device__ inline void load_transposed(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

__device__ inline unsigned add_halves(unsigned a, unsigned b) {
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// The last address at or below `at` that is a multiple of 16 bytes, and the samples between the two.
template <typename Sample>
__device__ inline const uint4* aligned_below(const Sample* at) {
    return reinterpret_cast<const uint4*>(reinterpret_cast<unsigned long long>(at) / 16 * 16);
}

template <typename Sample>
__device__ inline unsigned samples_past(const Sample* at) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(at)) % 16 / sizeof(Sample);
}

// The samples of flat indices `first` and `second`, of which a word holds two.
template <int SIZE>
__device__ inline unsigned pair_of(const unsigned (&words)[SIZE], int first, int second) {
    return __byte_perm(words[first / 2], words[second / 2], (first % 2 ? 0x32 : 0x10) | (second % 2 ? 0x7600 : 0x5400));
}

template <int SIZE>
__device__ inline void load_vector(unsigned (&words)[SIZE], int at, const unsigned char* from) {
    const uint4 vector = *reinterpret_cast<const uint4*>(from);
    words[at] = vector.x, words[at + 1] = vector.y, words[at + 2] = vector.z, words[at + 3] = vector.w;
}

// Drops the first `count` samples (0 … 7) of all but the last four words.
template <int SIZE>
__device__ inline void drop_samples(unsigned (&words)[SIZE], unsigned count) {
#pragma unroll
    for (int i = 0; i < SIZE - 2; ++i) words[i] = count & 4 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < SIZE - 3; ++i) words[i] = count & 2 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < SIZE - 4; ++i) words[i] = count & 1 ? __byte_perm(words[i], words[i + 1], 0x5432) : words[i];
}

template <int CHANNELS, int RADIUS, bool ALIGNED>
__global__ void __launch_bounds__(Words<CHANNELS, RADIUS, ALIGNED>::THREADS, Words<CHANNELS, RADIUS, ALIGNED>::BLOCKS)
words(const unsigned short* __restrict__ in, unsigned short* __restrict__ out, Picture picture,
      const __grid_constant__ WordsFilter filter, BlockPartition tiles) {
    typedef unsigned short Sample;
    typedef Words<CHANNELS, RADIUS, ALIGNED> Shape;
    constexpr int SEEN = Shape::SEEN, CHUNK = Shape::CHUNK, PITCH = Shape::PITCH, HIGH = Shape::ROWS_OF_A_WARP;
    constexpr int SEEN_BLOCKS = SEEN + HIGH - 1;
    extern __shared__ __align__(16) unsigned char shared[];
    int* rows = reinterpret_cast<int*>(shared);  // -1: beyond the edge
    unsigned char* stage = shared + Shape::SEEN_ROWS * 4;
    unsigned char* planes = stage + Shape::STAGE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    const int channel = warp % CHANNELS, band = warp / CHANNELS;
    unsigned char* results = planes + Shape::PLANES + band * CHANNELS * Shape::BAND * PITCH;

    const Place area = place_in_strips(blockIdx.x, picture);
    const Sample* in_plane = in + area.plane * picture.rows * picture.row_samples;
    const int y = area.band * Shape::ROWS, columns = picture.out_row_samples / CHANNELS;
    const int x_begin = tiles.begin(area.tile), x_end = min(tiles.begin(area.tile + 1), columns);
    const int first = y + picture.centre_y - RADIUS;
    const bool inside = first >= 0 && first + Shape::SEEN_ROWS <= picture.rows;
    for (int i = threadIdx.x; i < Shape::SEEN_ROWS; i += Shape::THREADS)
        rows[i] = border_index(first + i, picture.rows, picture.mode_y);
    const unsigned fill = picture.fill * 0x10001u;

    // Lanes read different weights, which constant memory would serve one by one.
    for (int i = threadIdx.x; i < sizeof(WordsFilter) / 4; i += Shape::THREADS)
        reinterpret_cast<unsigned*>(stage)[i] = reinterpret_cast<const unsigned*>(&filter)[i];
    const WordsFilter& weights = *reinterpret_cast<const WordsFilter*>(stage);
    __syncthreads();

    // Left factors, down: the weights of the two bytes of rows k and k + 1 for result m, for the three sums of each result,
    // in units of 1, 2^-8 and 2^-16. Right factors, across: of positions k and k + 1 for result n; results are ordered so
    // that a lane gets four neighbours.
    const auto weight = [](const auto* half, int distance) {
        return abs(distance) <= RADIUS ? static_cast<unsigned>(half[abs(distance)]) : 0u;
    };
    unsigned down[SEEN][3][4], upper[SEEN][2][2], lower[SEEN][2][2];
#pragma unroll
    for (int block = 0; block < SEEN; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int ahead = 16 * block + 2 * place + i / 2 * 8 - (group + i % 2 * 8) - RADIUS;
            unsigned limb[3] = {};  // of both rows, in the high bytes of halves
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                limb[0] |= (weight(weights.u1, ahead + row) & 0xFFu) << (16 * row + 8);
                limb[1] |= (weight(weights.u0, ahead + row) & 0xFFu) << (16 * row + 8);
                limb[2] |= (weight(weights.f, ahead + row) & 0xFFu) << (16 * row + 8);
            }
            down[block][0][i] = opaque(limb[0]);
            down[block][1][i] = opaque(limb[1] | limb[0] >> 8);
            down[block][2][i] = opaque(limb[2] | limb[1] >> 8);
            const int result = group / 2 * 4 + i / 2 * 2 + group % 2, from = 16 * block + 2 * place + i % 2 * 8 - result - RADIUS;
            upper[block][i / 2][i % 2] = opaque(weight(weights.h, from) | weight(weights.h, from + 1) << 16);
            lower[block][i / 2][i % 2] = opaque(weight(weights.l, from) | weight(weights.l, from + 1) << 16);
        }
    grid_dependency_synchronize();
    __syncthreads();

    constexpr int VECTORS = Shape::VECTORS, AT_ONCE = Shape::THREADS / VECTORS;
    int x = 0;                  // of the chunk in the stage
    bool shifted_rows = false;  // whether rows of the stage begin with samples before those of the chunk
    const auto start_of = [&](int row) { return in_plane + row * static_cast<long long>(picture.row_samples) + x * CHANNELS; };

    // The chunk whose first position is `from`, into the stage: in whole vectors, from the aligned address below each row on
    // if rows are not aligned, unless they or the rows end there.
    const auto fetch = [&](int from) {
        x = from;
        const int begin = x * CHANNELS, end = begin + CHUNK * CHANNELS;
        const bool whole = ALIGNED ? begin >= 0 && end <= picture.row_samples : begin >= 8 && end + 8 <= picture.row_samples;
        const int row = threadIdx.x / VECTORS, place = threadIdx.x % VECTORS;
        shifted_rows = !ALIGNED && whole;
        if (whole && ALIGNED && inside) {
            const Sample* source = start_of(first + row) + place * 8;
            const long long stride = AT_ONCE * static_cast<long long>(picture.row_samples);
            if (row < AT_ONCE)
#pragma unroll
                for (int i = 0; i < Shape::SEEN_ROWS; i += AT_ONCE, source += stride)
                    if (i + AT_ONCE <= Shape::SEEN_ROWS || row + i < Shape::SEEN_ROWS)
                        copy_16_bytes<256>(stage + (threadIdx.x + i * VECTORS) * 16, source);
            return;
        }
        if (whole) {
#pragma unroll(ALIGNED ? 1 : 4)
            for (int i = row < AT_ONCE ? row : Shape::SEEN_ROWS; i < Shape::SEEN_ROWS; i += AT_ONCE) {
                uint4* to = reinterpret_cast<uint4*>(stage) + i * VECTORS + place;
                if (rows[i] >= 0) copy_16_bytes<256>(to, aligned_below(start_of(rows[i])) + place);
                else *to = make_uint4(fill, fill, fill, fill);
            }
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < Shape::SEEN_ROWS * VECTORS; i += Shape::THREADS) {
            const int line = rows[i / VECTORS], at = i % VECTORS * 8;
            if (begin + at >= picture.row_samples + (2 * RADIUS + 1) * CHANNELS) continue;  // no window sees farther out
#pragma unroll 1
            for (int k = at; k < at + 8; ++k) {
                const int position = border_index(x + k / CHANNELS, picture.columns, picture.mode_x);
                const bool beyond = line < 0 || position < 0;
                reinterpret_cast<Sample*>(stage)[i * 8 + k - at] =
                    beyond ? static_cast<Sample>(fill)
                           : in_plane[line * static_cast<long long>(picture.row_samples) + position * CHANNELS + k % CHANNELS];
            }
        }
    };

    // The stage, channel by channel.
    const auto split = [&] {
#pragma unroll 1
        for (int i = threadIdx.x; i < Shape::SEEN_ROWS * Shape::GROUPS; i += Shape::THREADS) {
            const int line = i / Shape::GROUPS, group = i % Shape::GROUPS;
            const unsigned char* source = stage + (line * VECTORS + group * CHANNELS) * 16;
            unsigned word[4 * CHANNELS + 4];
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) load_vector(word, 4 * k, source + 16 * k);
            if (!ALIGNED && shifted_rows) {
                load_vector(word, 4 * CHANNELS, source + 16 * CHANNELS);
                drop_samples(word, samples_past(start_of(rows[line])));
            }
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                unsigned own[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    own[k] = filter.middle ^ pair_of(word, 2 * k * CHANNELS + c, (2 * k + 1) * CHANNELS + c);
                *reinterpret_cast<uint4*>(planes + (c * Shape::SEEN_ROWS + line) * PITCH + group * 16) =
                    make_uint4(own[0], own[1], own[2], own[3]);
            }
        }
    };

    // The band's results of the chunk from position `from` on, to memory. A thread writes the whole vectors that begin at its
    // 8 positions; if rows are not aligned, the first of a row also writes the samples before those, and the last those behind.
    const auto write = [&](int from) {
        const bool whole = ALIGNED && from + CHUNK <= x_end && y + Shape::ROWS <= picture.out_rows;
#pragma unroll 1
        for (int i = threadIdx.x % (32 * CHANNELS); i < Shape::BAND * Shape::GROUPS; i += 32 * CHANNELS) {
            const int row = i / Shape::GROUPS, group = i % Shape::GROUPS;
            const int at = from + group * 8, line = y + band * Shape::BAND + row;
            if (!whole && (line >= picture.out_rows || at >= x_end)) continue;
            const unsigned char* source = results + row * PITCH + group * 16;
            unsigned own[4 * CHANNELS], word[4 * CHANNELS + 4];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) load_vector(own, 4 * c, source + c * Shape::BAND * PITCH);
#pragma unroll
            for (int k = 0; k < 4 * CHANNELS; ++k) {
                const int one = 2 * k, other = 2 * k + 1;
                const int first_at = 8 * (one % CHANNELS) + one / CHANNELS, second_at = 8 * (other % CHANNELS) + other / CHANNELS;
                word[k] = filter.middle ^ pair_of(own, first_at, second_at);
            }
            const auto vector = [&](int k) { return make_uint4(word[4 * k], word[4 * k + 1], word[4 * k + 2], word[4 * k + 3]); };
            const auto single = [&](int k) { return static_cast<Sample>(word[k / 2] >> k % 2 * 16); };
            Sample* to = out + (area.plane * picture.out_rows + line) * picture.out_row_samples + at * CHANNELS;
            const int before = ALIGNED ? 0 : (8 - samples_past(to)) % 8;
            int count = whole ? 8 * CHANNELS : min(8, x_end - at) * CHANNELS;
            if (!ALIGNED && group == 0)
#pragma unroll
                for (int k = 0; k < 7; ++k)
                    if (k < min(before, count)) to[k] = single(k);
            if (!ALIGNED && before > 0) {
                if (group + 1 < Shape::GROUPS) {  // the last vector ends in the next thread's positions
                    count += min(before, max(x_end - at - 8, 0) * CHANNELS);
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const unsigned char* next = source + 16 + k % CHANNELS * Shape::BAND * PITCH + k / CHANNELS * 2;
                        const unsigned sample = *reinterpret_cast<const Sample*>(next) << k % 2 * 16;
                        word[4 * CHANNELS + k / 2] = k % 2 ? word[4 * CHANNELS + k / 2] | sample : sample;
                    }
#pragma unroll
                    for (int k = 0; k < 4; ++k) word[4 * CHANNELS + k] ^= filter.middle;
                }
                drop_samples(word, before);
            }
            if (whole || before + 8 * CHANNELS <= count) {
#pragma unroll
                for (int v = 0; v < CHANNELS; ++v) store_16_bytes(to + before + 8 * v, vector(v));
                continue;
            }
#pragma unroll
            for (int v = 0; v < CHANNELS; ++v)
                if (!ALIGNED && before + 8 * v + 8 <= count) store_16_bytes(to + before + 8 * v, vector(v));
                else
#pragma unroll
                    for (int k = 8 * v; k < 8 * v + 8; ++k)
                        if (before + k < count) to[before + k] = single(k);
        }
    };

    unsigned blocks[SEEN][HIGH][2][4];  // a - 1024 and b - 512, in units of 2^-24, as left factors
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(planes)) +
                          (channel * Shape::SEEN_ROWS + band * Shape::BAND + lane % 16) * PITCH + lane / 16 * 16;
    unsigned char* result = results + (channel * Shape::BAND + group) * PITCH + 8 * place;

    const int finer = filter.finer;
    const unsigned upper_unit = Shape::FAR ? opaque(1u << (16 - finer)) : 1u << 16;

    // Sums 16 columns, from byte `at` of the planes on.
    const auto sum_down = [&](unsigned(&sums)[HIGH][2][4], unsigned at) {
        unsigned seen[SEEN_BLOCKS][4];
#pragma unroll
        for (int block = 0; block < SEEN_BLOCKS; ++block) load_transposed(seen[block], from + at + 16 * block * PITCH);
#pragma unroll
        for (int high = 0; high < HIGH; ++high) {
            int sum[3][2][4] = {};
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[2][i / 4][i % 4] = filter.bias;
#pragma unroll
            for (int block = 0; block < SEEN; ++block)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int limb = 0; limb < 3; ++limb)
                        multiply_add(sum[limb][half], down[block][limb], seen[high + block][2 * half], seen[high + block][2 * half + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned whole[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const auto part = [&](int limb) { return sum[limb][i / 2][i % 2 * 2 + k]; };
                    const int low = part(1) * 256 + part(2);
                    whole[k] = static_cast<unsigned>(part(0)) * upper_unit + static_cast<unsigned>(Shape::FAR ? low >> finer : low);
                }
                sums[high][0][i] = add_halves(__byte_perm(whole[0], whole[1], 0x7632) >> 5 & 0x07FF07FFu, 0x84008400u);
                sums[high][1][i] = add_halves(__byte_perm(whole[0], whole[1], 0x6521) >> 3 & 0x03FF03FFu, 0x82008200u);
            }
        }
    };

    // Sums 16 positions along the rows, from SEEN blocks of which `oldest` is the first.
    const auto sum_across = [&](int oldest) {
#pragma unroll
        for (int high = 0; high < HIGH; ++high) {
            unsigned bits[2][4];  // of both rows
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                float upper_sum[4] = {}, lower_sum[4] = {}, rest[4] = {};
#pragma unroll
                for (int block = 0; block < SEEN; ++block) {
                    const unsigned(&seen)[2][4] = blocks[(oldest + block) % SEEN][high];
                    multiply_add(upper_sum, seen[0], upper[block][part][0], upper[block][part][1]);
                    // The outer blocks of l in the other sum: both stay below 2^24.
                    const bool outer = Shape::FAR && (block == 0 || block == SEEN - 1);
                    multiply_add(outer ? rest : lower_sum, seen[0], lower[block][part][0], lower[block][part][1]);
                    multiply_add(rest, seen[1], upper[block][part][0], upper[block][part][1]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float sum = fma_rn(lower_sum[i] + rest[i], 0x1p-10f, upper_sum[i]);
                    bits[i / 2][2 * part + i % 2] = __float_as_uint(fma_rn(sum, 0x1p15f, 12582912.0f + 32784.0f));
                }
            }
#pragma unroll
            for (int row = 0; row < 2; ++row)
                *reinterpret_cast<uint2*>(result + (16 * high + 8 * row) * PITCH + 32 * oldest) =
                    make_uint2(__byte_perm(bits[row][0], bits[row][1], 0x5410), __byte_perm(bits[row][2], bits[row][3], 0x5410));
        }
    };

    fetch(x_begin + picture.centre_x / CHANNELS - RADIUS - 16);
    wait_for_copies();
    __syncthreads();
    split();
    __syncthreads();
    const auto next_chunk = [&] {
        if (x + CHUNK < x_end + picture.centre_x / CHANNELS + RADIUS) fetch(x + CHUNK);
    };
    next_chunk();
#pragma unroll
    for (int block = 1; block < SEEN; ++block) sum_down(blocks[block - 1], 32 * block);
#pragma unroll 1
    for (int at = x_begin; at < x_end; at += CHUNK) {
        wait_for_copies();
        __syncthreads();
        split();
        if (at > x_begin) write(at - CHUNK);
        __syncthreads();
        next_chunk();
#pragma unroll
        for (int block = 0; block < SEEN; ++block) {
            sum_down(blocks[(SEEN - 1 + block) % SEEN], 32 * block);
            sum_across(block);
        }
    }
    __syncthreads();
    write(x_begin + (x_end - x_begin - 1) / CHUNK * CHUNK);
}

struct WordsWeights {
    int upper[WORDS_REACH + 1], lower[WORDS_REACH + 1], bias, shift;  // by distance
    unsigned middle;                                                  // 2^15 if samples are signed
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
        int upper = 0, lower = 0;
        for_window(sums, axis, i, fill, [&](int k, unsigned v) {
            const int a = static_cast<int>(v >> 10) - 1024, b = static_cast<int>(v & 1023) - 512;
            upper += weights.upper[k] * a;
            lower += weights.lower[k] * a + weights.upper[k] * b;
        });
        const float sum = fma_rn(__int2float_rn(lower), 0x1p-10f, __int2float_rn(upper));
        const unsigned bits = __float_as_uint(fma_rn(sum, 0x1p-9f, 12582912.0f + 32784.0f));
        out[i] = static_cast<unsigned short>(bits ^ weights.middle);
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
