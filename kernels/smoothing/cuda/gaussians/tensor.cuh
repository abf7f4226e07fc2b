// Gaussians of bytes along both axes at once, on tensor cores. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "opaque.cuh"
#include "shifted.cuh"

// tensor: sums along an axis are products with a banded matrix of weights. All of them are exact (see kernels/smoothing), so
// their order does not matter. A block walks along a strip of rows, its warps one below the other, while the next columns
// are copied to shared memory. Down the columns the weights are the left factor, and the samples, two rows at a time, the
// right one. Its results are in the lanes where the next product needs its left factor; the weights are then on the right.
// So only samples and results pass through shared memory.
//
//   copies of the next chunk ........ ring         asynchronous, while the warps sum those before
//     |  barrier        this turn's chunk has arrived, and the oldest has been read: copies of another take its place
//   each warp         16 columns of its 16 rows at a time: ring -> sums down -> registers -> sums across -> its results
//     |  its lanes      wait for each other before and after
//   each warp         results -> memory
//
// The bits of a byte are a float16 in units of 2^-24, the smallest: no conversion is needed. Weights 2^15 times as large
// bring the sums to units of 2^-9.
//
// Floors for N samples of a byte (8192 x 8192 RGB) on an H200 (4.2 TB/s; mma.sync measured at 305 T multiply-adds/s):
//   bytes         2 N                                                     98 us
//   products      2 N times 32, 32, 48, 80 for reaches of 4, 8, 16, 32    42 us, 42 us, 63 us, 105 us
//   instructions  some 9 N issued (nvcc 13, counted)                      55 us
constexpr int TENSOR_WARPS = 4, TENSOR_THREADS = 32 * TENSOR_WARPS, TENSOR_ROWS = 16 * TENSOR_WARPS;
constexpr int TENSOR_REACH = 32;  // maximum

struct TensorFilter {
    unsigned short y[TENSOR_REACH + 1], x[TENSOR_REACH + 1];  // weights at distance 0 …, as float16; y is 2^15 times as large
    float rounding, scale;                                    // of round_pair() and finish()
};

template <int CHANNELS, int RADIUS>
struct Tensor {
    static constexpr int SEEN = (16 + 2 * RADIUS + 15) / 16;  // blocks of 16 positions that 16 neighbouring windows see
    static constexpr int SEEN_ROWS = TENSOR_ROWS + 16 * (SEEN - 1);
    // On a multiprocessor, as registers allow: 20, 16 or 8 warps.
    static constexpr int BLOCKS = SEEN * CHANNELS > 12 ? 2 : SEEN * CHANNELS > 6 || SEEN > 3 ? 4 : 5;
    // Positions that are fetched and written at once: one turn of the blocks in use.
    static constexpr int CHUNK = 16 * SEEN, CHUNK_BYTES = CHUNK * CHANNELS, A_ROW = CHUNK_BYTES / 16;
    // The first block starts 16 + SURPLUS positions into the first chunk, so that the chunk starts at a whole vector.
    static constexpr int LEAD = (RADIUS + 15) / 16 * 16, SURPLUS = LEAD - RADIUS;
    static constexpr int SLOTS = SURPLUS > 0 ? 3 : 2, RING = SLOTS * CHUNK;  // chunks in use, and one in flight
    // Rows two apart start about 8 banks apart; rows of results so that eight lanes use different banks.
    static constexpr int PITCH = (RING * CHANNELS / 16 | 1) * 16;
    static constexpr int RESULT_PITCH = (CHUNK_BYTES / 16 + (CHANNELS == 4 ? 4 : CHANNELS == 2 ? 2 : 1)) * 16;
    static constexpr int RESULTS = 16 * RESULT_PITCH;
    static constexpr int SHARED_BYTES = SEEN_ROWS * (PITCH + 8) + TENSOR_WARPS * RESULTS;
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

// Two sums down the columns, rounded, less 128, in float16. Adding `rounding`, which is slightly more than 1.5 * 2^21 (for
// quarters) or 1.5 * 2^23 (for whole numbers), rounds and leaves the float16 of 1536 + the value in the low half.
__device__ inline unsigned round_pair(float first, float second, float rounding) {
    const unsigned pair = __byte_perm(__float_as_uint(fma_rn(first, 512.0f, rounding)),
                                      __float_as_uint(fma_rn(second, 512.0f, rounding)), 0x5410);
    unsigned rounded;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(rounded) : "r"(pair), "r"(0x66006600u));
    return rounded;
}

// A sum along the row as a sample, in the lowest byte.
__device__ inline unsigned finish(float sum, float scale) { return __float_as_uint(fma_rn(sum, scale, 12582912.0f + 128.0f)); }

// How a block fetches chunks: each thread copies one vector of every AT_ONCE rows.
template <typename Shape, int CHANNELS>
struct TensorInput {
    static constexpr int AT_ONCE = TENSOR_THREADS / Shape::A_ROW;  // rows
    unsigned char* samples;
    const unsigned char* plane;
    const long long* offsets;  // of rows in the plane; -1: beyond the edge
    const Picture& picture;
    bool inside;     // all rows lie inside
    int to;          // of the thread's vector in a row of `samples`; -1: this thread has none
    long long from;  // and in the plane, in the chunk at position 0

    __device__ TensorInput(unsigned char* samples, const unsigned char* plane, const long long* offsets, bool inside,
                           const Picture& picture)
        : samples(samples), plane(plane), offsets(offsets), picture(picture), inside(inside) {
        const int row = threadIdx.x / Shape::A_ROW, at = threadIdx.x % Shape::A_ROW * 16;
        to = opaque(row < AT_ONCE ? row * Shape::PITCH + at : -1);
        from = opaque(offsets[min(row, Shape::SEEN_ROWS - 1)] + at);
    }

    // The chunk whose first position is `x`, into a slot that begins at byte `slot` of each row.
    __device__ void fetch(int x, int slot) const {
        if (!picture.aligned_in) {
            const int begin = x * CHANNELS;
            if (begin < 15 || begin + Shape::CHUNK_BYTES + 15 > picture.row_samples) return fetch_vectors(x, slot);
            return fetch_anywhere(begin, slot);
        }
        if (!inside || x < 0 || x + Shape::CHUNK > picture.columns) return fetch_vectors(x, slot);
        if (to < 0) return;
        const unsigned char* source = plane + from + x * CHANNELS;
        const long long stride = AT_ONCE * static_cast<long long>(picture.row_samples);
        constexpr int LAST = Shape::SEEN_ROWS % AT_ONCE * Shape::PITCH;  // only rows before this have one more to do
#pragma unroll
        for (int i = 0; i < Shape::SEEN_ROWS; i += AT_ONCE, source += stride)
            if (i + AT_ONCE <= Shape::SEEN_ROWS || to < LAST) copy_16_bytes<256>(samples + to + slot + i * Shape::PITCH, source);
    }

    // The same if part of it lies beyond an edge.
    __device__ void fetch_vectors(int x, int slot) const {
        const unsigned fill = picture.fill * 0x01010101u;
        const int reach = Shape::LEAD * CHANNELS;
#pragma unroll 1
        for (int i = threadIdx.x; i < Shape::SEEN_ROWS * Shape::A_ROW; i += TENSOR_THREADS) {
            const int row = i / Shape::A_ROW, at = i % Shape::A_ROW * 16, sample = x * CHANNELS + at;
            unsigned char* vector = samples + row * Shape::PITCH + slot + at;
            if (offsets[row] < 0) *reinterpret_cast<uint4*>(vector) = make_uint4(fill, fill, fill, fill);
            else if (picture.aligned_in && sample >= 0 && sample + 16 <= picture.row_samples)
                copy_16_bytes(vector, plane + offsets[row] + sample);
            else if (sample + 16 > -reach && sample < picture.row_samples + reach)  // no window sees farther out
#pragma unroll 1
                for (int k = 0; k < 16; ++k) vector[k] = byte_at(offsets[row], x, at + k);
        }
    }

    // The same for unaligned rows, from byte `begin` of each on.
    __device__ void fetch_anywhere(int begin, int slot) const {
        const unsigned fill = picture.fill * 0x01010101u;
#pragma unroll 2
        for (int i = threadIdx.x; i < Shape::SEEN_ROWS * Shape::A_ROW; i += TENSOR_THREADS) {
            const int row = i / Shape::A_ROW, at = i % Shape::A_ROW * 16;
            const uint4 vector = offsets[row] < 0 ? make_uint4(fill, fill, fill, fill)
                                                  : load_anywhere(plane + offsets[row] + begin + at);
            *reinterpret_cast<uint4*>(samples + row * Shape::PITCH + slot + at) = vector;
        }
    }

    // Byte `at` behind position `x` of the row that begins at `offset`.
    __device__ unsigned char byte_at(long long offset, int x, int at) const {
        const int position = border_index(x + at / CHANNELS, picture.columns, picture.mode_x);
        return position < 0 || offset < 0 ? picture.fill : __ldg(plane + offset + position * CHANNELS + at % CHANNELS);
    }
};

// How a warp writes its rows of chunks of results: each lane writes one vector of every AT_ONCE rows.
template <typename Shape, int CHANNELS>
struct TensorOutput {
    static constexpr int AT_ONCE = 32 / Shape::A_ROW;  // rows
    const unsigned char* results;
    unsigned char* out;
    long long first;  // the start of the warp's first row in `out`
    int rows;         // to write
    int from;         // of the lane's vector in `results`; -1: this lane has none
    long long to;     // and in `out`, in the chunk at position 0
    long long stride;
    bool whole;  // whether it writes all rows, in whole vectors

    __device__ TensorOutput(const unsigned char* results, unsigned char* out, long long first, int rows, const Picture& picture)
        : results(results), out(out), first(first), rows(rows), stride(picture.out_row_samples) {
        const int row = threadIdx.x % 32 / Shape::A_ROW, at = threadIdx.x % 32 % Shape::A_ROW * 16;
        from = opaque(row < AT_ONCE ? row * Shape::RESULT_PITCH + at : -1);
        to = opaque(first + row * stride + at);
        whole = picture.aligned_out && rows >= 16;
    }

    // Writes some positions of the chunk from position `x` on.
    __device__ void store(int x, int positions) const {
        if (!whole || positions < Shape::CHUNK) return store_rows(x, min(positions, Shape::CHUNK));
        if (from < 0) return;
        unsigned char* target = out + to + x * CHANNELS;
        constexpr int LAST = 16 % AT_ONCE * Shape::RESULT_PITCH;  // only rows before this have one more to do
#pragma unroll
        for (int i = 0; i < 16; i += AT_ONCE, target += AT_ONCE * stride)
            if (i + AT_ONCE <= 16 || from < LAST)
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(results + from + i * Shape::RESULT_PITCH);
    }

    // The same for unaligned rows, or if part of the chunk is not written.
    __device__ void store_rows(int x, int positions) const {
        const unsigned char* result = results;
        unsigned char* line = out + first + x * CHANNELS;
#pragma unroll 1
        for (int row = 0; row < min(rows, 16); ++row, line += stride, result += Shape::RESULT_PITCH)
            store_anywhere<Shape::CHUNK_BYTES>(
                line, positions * CHANNELS, [&](int i) { return reinterpret_cast<const uint4*>(result)[i]; },
                [&](int i) { return result[i]; });
    }
};

// Sums 16 columns of all channels, and rounds the sums, as left factors of the next product. `from` points to the first
// samples that the lane reads: rows 2 (lane % 4) and the next, of positions 2 (lane / 4) and the next.
template <typename Shape, int CHANNELS>
__device__ inline void sum_down(unsigned (&rounded)[CHANNELS][4], const unsigned char* from,
                                const unsigned (&weights)[Shape::SEEN][4], float rounding) {
    float sum[CHANNELS][2][4] = {};
#pragma unroll
    for (int block = 0; block < Shape::SEEN; ++block) {
        unsigned pairs[2][CHANNELS][2];  // of rows, for each position
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned char* rows = from + (16 * block + 8 * half) * Shape::PITCH;
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                const unsigned upper = *reinterpret_cast<const unsigned short*>(rows + 2 * i);
                const unsigned lower = *reinterpret_cast<const unsigned short*>(rows + Shape::PITCH + 2 * i);
                pairs[2 * i / CHANNELS][2 * i % CHANNELS][half] = __byte_perm(upper, lower, 0x6420);
                pairs[(2 * i + 1) / CHANNELS][(2 * i + 1) % CHANNELS][half] = __byte_perm(upper, lower, 0x6521);
            }
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int place = 0; place < 2; ++place)
                multiply_add(sum[c][place], weights[block], pairs[place][c][0], pairs[place][c][1]);
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            rounded[c][i] = round_pair(sum[c][i / 2][i % 2 * 2], sum[c][i / 2][i % 2 * 2 + 1], rounding);
}

template <int CHANNELS>
__device__ inline void put(unsigned char* to, const unsigned (&word)[CHANNELS]) {
    if constexpr (CHANNELS == 4) *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    else if constexpr (CHANNELS == 2) *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    else
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) reinterpret_cast<unsigned*>(to)[i] = word[i];
}

// Sums 16 positions of all channels along their rows, from SEEN blocks of which `oldest` is the first. The lane's first four
// positions go to `to`.
template <typename Shape, int CHANNELS>
__device__ inline void sum_across(unsigned char* to, const unsigned (&blocks)[Shape::SEEN][CHANNELS][4], int oldest,
                                  const unsigned (&weights)[Shape::SEEN][2][2], float scale) {
    float sum[CHANNELS][2][4] = {};
#pragma unroll
    for (int block = 0; block < Shape::SEEN; ++block)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int part = 0; part < 2; ++part)
                multiply_add(sum[c][part], blocks[(oldest + block) % Shape::SEEN][c], weights[block][part][0],
                             weights[block][part][1]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        unsigned word[CHANNELS];
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) {
            unsigned bits[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int place = (4 * i + j) / CHANNELS, c = (4 * i + j) % CHANNELS;
                bits[j] = finish(sum[c][place / 2][2 * row + place % 2], scale);
            }
            word[i] = pack<unsigned char>(bits).word[0];
        }
        put(to + 8 * row * Shape::RESULT_PITCH, word);
    }
}

template <int CHANNELS, int RADIUS>
__global__ void __launch_bounds__(TENSOR_THREADS, Tensor<CHANNELS, RADIUS>::BLOCKS)
tensor(const unsigned char* __restrict__ in, unsigned char* __restrict__ out, Picture picture, TensorFilter filter,
       BlockPartition tiles) {
    typedef Tensor<CHANNELS, RADIUS> Shape;
    constexpr int SEEN = Shape::SEEN, CHUNK = Shape::CHUNK;
    extern __shared__ __align__(16) unsigned char shared[];
    long long* offsets = reinterpret_cast<long long*>(shared);
    unsigned char* samples = shared + Shape::SEEN_ROWS * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    unsigned char* results = samples + Shape::SEEN_ROWS * Shape::PITCH + warp * Shape::RESULTS;

    const Place area = place_in_strips(blockIdx.x, picture);
    const unsigned char* in_plane = in + area.plane * picture.rows * picture.row_samples;
    const int y = area.band * TENSOR_ROWS, warp_y = y + 16 * warp;
    const int x_begin = tiles.begin(area.tile), x_end = min(tiles.begin(area.tile + 1), picture.out_row_samples / CHANNELS);

    const int first = y + picture.centre_y - RADIUS;
    for (int i = threadIdx.x; i < Shape::SEEN_ROWS; i += TENSOR_THREADS) {
        const int row = border_index(first + i, picture.rows, picture.mode_y);
        offsets[i] = row < 0 ? -1 : row * static_cast<long long>(picture.row_samples);
    }
    __syncthreads();
    const bool inside = first >= 0 && first + Shape::SEEN_ROWS <= picture.rows;
    const TensorInput<Shape, CHANNELS> input(samples, in_plane, offsets, inside, picture);
    const long long first_line = (area.plane * picture.out_rows + warp_y) * picture.out_row_samples;
    const TensorOutput<Shape, CHANNELS> output(results, out, first_line, picture.out_rows - warp_y, picture);

    const int turns = (x_end - x_begin + CHUNK - 1) / CHUNK, chunks = turns + Shape::SLOTS - 1;
    int x_next = x_begin + picture.centre_x / CHANNELS - 16 - Shape::LEAD, next = 0, slot = 0;  // to be fetched
    const auto fetch = [&] {
        if (next++ < chunks) input.fetch(x_next, slot);
        x_next += CHUNK, slot = slot == (Shape::SLOTS - 1) * Shape::CHUNK_BYTES ? 0 : slot + Shape::CHUNK_BYTES;
    };
#pragma unroll
    for (int i = 1; i < Shape::SLOTS; ++i) fetch();

    // Factors: down, the weight of row k for result m; across, of position k for result n. Positions alternate between the
    // two halves of a block, and results are ordered so that a lane gets four neighbours.
    const auto weight_of = [&](const unsigned short* half, int distance) {
        return abs(distance) <= RADIUS ? static_cast<unsigned>(half[abs(distance)]) : 0u;
    };
    unsigned down[SEEN][4], across[SEEN][2][2];
#pragma unroll
    for (int block = 0; block < SEEN; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int ahead = 16 * block + 2 * place + i / 2 * 8 - (group + i % 2 * 8) - RADIUS;
            down[block][i] = opaque(weight_of(filter.y, ahead) | weight_of(filter.y, ahead + 1) << 16);
            const int result = group / 2 * 4 + i / 2 * 2 + group % 2, from = 16 * block + 4 * place + i % 2 - result - RADIUS;
            across[block][i / 2][i % 2] = opaque(weight_of(filter.x, from) | weight_of(filter.x, from + 2) << 16);
        }

    unsigned blocks[SEEN][CHANNELS][4];
    const int rows = (16 * warp + 2 * place) * Shape::PITCH, end = opaque(rows + Shape::RING * CHANNELS);
    unsigned char* result = results + opaque(group * Shape::RESULT_PITCH + 4 * place * CHANNELS);
    const auto sum_block = [&](unsigned(&sums)[CHANNELS][4], int at, bool at_end) {  // at_end: may wrap
        if (at_end && at >= end) at -= Shape::RING * CHANNELS;
        sum_down<Shape>(sums, samples + at, down, filter.rounding);
    };
    int at = opaque(rows + (16 + Shape::SURPLUS + 2 * group) * CHANNELS);
    wait_for_copies();
    __syncthreads();
    fetch();
#pragma unroll
    for (int block = 0; block < SEEN - 1; ++block, at += 16 * CHANNELS) sum_block(blocks[block], at, false);
#pragma unroll 1
    for (int x = x_begin; x < x_end; x += CHUNK) {
        wait_for_copies();
        __syncthreads();  // this turn's chunks are visible, and the last turn's have been read
        fetch();
#pragma unroll
        for (int phase = 0; phase < SEEN; ++phase, at += 16 * CHANNELS) {
            sum_block(blocks[(SEEN - 1 + phase) % SEEN], at, Shape::SURPLUS > 0 && phase == SEEN - 1);
            sum_across<Shape>(result + phase * 16 * CHANNELS, blocks, phase, across, filter.scale);
        }
        if (at >= end) at -= Shape::RING * CHANNELS;
        __syncwarp();
        output.store(x, x_end - x);
        __syncwarp();
    }
}
