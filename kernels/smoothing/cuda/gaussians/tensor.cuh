// Gaussians of bytes along both axes at once, on tensor cores. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "opaque.cuh"
#include "shifted.cuh"

// tensor: kernels/smoothing/byte_sums.py defines the sums, which are exact, so their order does not matter. They are
// products with banded matrices of weights. A block walks along a strip of rows, its warps one below the other, while the
// next columns are copied to shared memory. Down the columns the weights are the left factor, and the samples, four rows of
// a column in a word, the right one: W x is 256 a x + b x, two products. Its results v are in the lanes where the next
// products need their left factors, four positions of their high or low bytes in a word; the weights are then on the right,
// and the products are 256 a h, b h and a l. So only samples and results pass through shared memory.
//
//   copies of the next chunk ........ ring         asynchronous, while the warps sum those before
//     |  barrier        this turn's chunk has arrived, and the oldest has been read: copies of another take its place
//   each warp         16 columns of its 16 rows at a time: ring -> sums down -> registers -> sums across -> its results
//     |  its lanes      wait for each other before and after
//   each warp         results -> memory
//
// Floors for N samples of a byte (8192 x 8192 RGB) on an H200 (4.2 TB/s; mma.sync measured at 612 T multiply-adds/s of bytes):
//   bytes         2 N                                                     98 us
//   products      5 N times 32, 32, 48, 80 for reaches of 4, 8, 16, 32    53 us, 53 us, 79 us, 132 us
//   instructions  some 8 N (reaches up to 8) and 10 N (16) in the loop    50 us, 62 us
// Measured (2026-11-27): 163 to 168 us for sigma 1 and 2, 229 to 236 for 4, 408 to 420 for 7.6; with unaligned rows (8191 x 8191)
// 214 to 221, 292 and 534.
constexpr int TENSOR_WARPS = 4, TENSOR_THREADS = 32 * TENSOR_WARPS, TENSOR_ROWS = 16 * TENSOR_WARPS;
constexpr int TENSOR_REACH = 32;  // maximum

struct TensorAxis {  // weights at distance 0 …
    unsigned char upper[TENSOR_REACH + 1];
    signed char lower[TENSOR_REACH + 1];
};

struct TensorFilter {
    TensorAxis y, x;
    int shift, unit, bias;  // of upper sums down the columns; of those across, and what is added to them
};

// ALIGNED: rows begin at multiples of 16 bytes, in the input and in the output. Other rows are copied to shared memory from
// the multiple below each row's part, with a vector more, and shifted when they are read. Since rows 16 apart are shifted by
// the same number of bytes, so are all that a lane reads at the same place of each block.
template <int CHANNELS, int RADIUS, bool ALIGNED>
struct Tensor {
    static constexpr bool ROWS_ALIGNED = ALIGNED;
    static constexpr int SEEN = (16 + 2 * RADIUS + 15) / 16;  // blocks of 16 positions that 16 neighbouring windows see
    static constexpr int SEEN_ROWS = TENSOR_ROWS + 16 * (SEEN - 1);
    // On a multiprocessor, as registers allow: 20, 16 or 8 warps.
    static constexpr int BLOCKS = SEEN * CHANNELS > 12 ? 2 : SEEN * CHANNELS > 6 || SEEN > 3 ? 4 : 5;
    // Positions that are fetched and written at once: one turn of the blocks in use.
    static constexpr int CHUNK = 16 * SEEN, CHUNK_BYTES = CHUNK * CHANNELS, VECTORS = CHUNK_BYTES / 16;
    // The first block starts 16 + SURPLUS positions into the first chunk, so that the chunk starts at a whole vector.
    static constexpr int LEAD = ALIGNED ? (RADIUS + 15) / 16 * 16 : RADIUS, SURPLUS = LEAD - RADIUS;
    // Vectors of a row that are fetched. Of three channels a lane may read a word behind them, of which it uses nothing; other
    // threads must not write there.
    static constexpr int A_ROW = VECTORS + !ALIGNED, SLOT = 16 * (A_ROW + (!ALIGNED && CHANNELS == 3));
    static constexpr int SLOTS = SURPLUS > 0 ? 3 : 2, RING = SLOTS * SLOT;  // chunks in use, and one in flight
    static constexpr int PITCH = (RING / 16 | 1) * 16;                      // rows two apart start about 8 banks apart
    // Unaligned results are written in units of sectors, or of vectors if a chunk is not a whole number of sectors. They follow
    // the start of a unit that the last chunk left (CARRIED).
    static constexpr int UNIT = CHUNK_BYTES % SECTOR_BYTES ? 16 : SECTOR_BYTES;
    static constexpr int CARRIED = ALIGNED ? 0 : UNIT, RESULT_VECTORS = VECTORS + 2 * CARRIED / 16;
    // Rows of results start in different banks for lanes that write neighbouring rows.
    static constexpr int APART = ALIGNED && CHANNELS % 2 == 0 ? CHANNELS : 1;
    static constexpr int RESULT_PITCH = ((RESULT_VECTORS + APART - 1) / (2 * APART) * 2 * APART + APART) * 16;
    static constexpr int RESULTS = 16 * RESULT_PITCH;
    static constexpr int SHARED_BYTES = SEEN_ROWS * (PITCH + 8) + TENSOR_WARPS * RESULTS;
};

// d += a b: a is 16 x 16, b 16 x 8, or 16 x 32 and 32 x 8 with a2 and b2; of bytes that are signed (s8) or not.
#if __CUDA_ARCH__ >= 800
#define MILLRACE_BYTE_PRODUCTS(NAME, A, B)                                                                              \
    struct NAME {                                                                                                       \
        __device__ void operator()(int(&d)[4], const unsigned(&a)[2], unsigned b) const {                               \
            asm("mma.sync.aligned.m16n8k16.row.col.s32." A "." B ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"\
                : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                        \
                : "r"(a[0]), "r"(a[1]), "r"(b));                                                                        \
        }                                                                                                               \
        __device__ void operator()(int(&d)[4], const unsigned(&a)[2], unsigned b, const unsigned(&a2)[2], unsigned b2) const {\
            asm("mma.sync.aligned.m16n8k32.row.col.s32." A "." B                                                        \
                ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                  \
                : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                        \
                : "r"(a[0]), "r"(a[1]), "r"(a2[0]), "r"(a2[1]), "r"(b), "r"(b2));                                       \
        }                                                                                                               \
    };
#else
#define MILLRACE_BYTE_PRODUCTS(NAME, A, B)                                                                              \
    struct NAME {                                                                                                       \
        __device__ void operator()(int(&d)[4], const unsigned(&a)[2], unsigned b) const {                               \
            for (int i = 0; i < 2; ++i)                                                                                 \
                asm("mma.sync.aligned.m8n8k16.row.col.s32." A "." B ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};"              \
                    : "+r"(d[2 * i]), "+r"(d[2 * i + 1])                                                                \
                    : "r"(a[i]), "r"(b));                                                                               \
        }                                                                                                               \
        __device__ void operator()(int(&d)[4], const unsigned(&a)[2], unsigned b, const unsigned(&a2)[2], unsigned b2) const {\
            (*this)(d, a, b);                                                                                           \
            (*this)(d, a2, b2);                                                                                         \
        }                                                                                                               \
    };
#endif
MILLRACE_BYTE_PRODUCTS(BytesByBytes, "u8", "u8")
MILLRACE_BYTE_PRODUCTS(SignedByBytes, "s8", "u8")
MILLRACE_BYTE_PRODUCTS(BytesBySigned, "u8", "s8")
#undef MILLRACE_BYTE_PRODUCTS

// The same of SEEN blocks of 16 positions, two at a time.
template <typename Multiply, int SEEN>
__device__ inline void multiply_add(int (&d)[4], const unsigned (&a)[SEEN][2], const unsigned (&b)[SEEN]) {
    const Multiply multiply;
#pragma unroll
    for (int block = 0; block + 1 < SEEN; block += 2) multiply(d, a[block], b[block], a[block + 1], b[block + 1]);
    if constexpr (SEEN % 2) multiply(d, a[SEEN - 1], b[SEEN - 1]);
}

// How a block fetches chunks: each thread copies one vector of every AT_ONCE rows.
template <typename Shape, int CHANNELS>
struct TensorInput {
    static constexpr int AT_ONCE = TENSOR_THREADS / Shape::A_ROW;  // rows
    unsigned char* samples;
    const unsigned char* plane;
    const long long* offsets;  // of rows in the plane; -1: beyond the edge
    const Picture& picture;
    bool inside;     // all rows lie inside
    unsigned start;  // of row 0 in the first chunk: the low bits of its address
    int to;          // of the thread's vector in a row of `samples`; -1: this thread has none
    long long from;  // and in the plane, in the chunk at position 0

    // The first row is row `first` of the image, the first chunk begins at position `x`.
    __device__ TensorInput(unsigned char* samples, const unsigned char* plane, const long long* offsets, int first, int x,
                           const Picture& picture)
        : samples(samples), plane(plane), offsets(offsets), picture(picture) {
        inside = first >= 0 && first + Shape::SEEN_ROWS <= picture.rows;
        start = static_cast<unsigned>(reinterpret_cast<unsigned long long>(plane)) +
                static_cast<unsigned>(first) * picture.row_samples + x * CHANNELS;
        const int row = threadIdx.x / Shape::A_ROW, at = threadIdx.x % Shape::A_ROW * 16;
        to = opaque(row < AT_ONCE ? row * Shape::PITCH + at : -1);
        from = opaque(offsets[min(row, Shape::SEEN_ROWS - 1)] + at);
    }

    // Bytes by which a row is shifted in `samples`.
    __device__ int shift_of(int row) const {
        return Shape::ROWS_ALIGNED ? 0 : (start + static_cast<unsigned>(row) * picture.row_samples) % 16;
    }

    // The chunk whose first position is `x`, into a slot that begins at byte `slot` of each row.
    __device__ void fetch(int x, int slot) const {
        constexpr int BESIDE = Shape::ROWS_ALIGNED ? 0 : 31;  // bytes that may be read beside the chunk
        const int begin = x * CHANNELS;
        if (begin < BESIDE || begin + Shape::CHUNK_BYTES + BESIDE > picture.row_samples) return fetch_bytes(x, slot);
        if (to < 0) return;
        if (!inside) {
            const int at = threadIdx.x % Shape::A_ROW * 16;
#pragma unroll 1
            for (int row = threadIdx.x / Shape::A_ROW; row < Shape::SEEN_ROWS; row += AT_ONCE)
                fetch_vector(samples + row * Shape::PITCH + slot + at, row, begin + at - shift_of(row));
            return;
        }
        const unsigned char* source = plane + from + begin;
        const long long stride = AT_ONCE * static_cast<long long>(picture.row_samples);
        constexpr int LAST = Shape::SEEN_ROWS % AT_ONCE * Shape::PITCH;  // only rows before this have one more to do
#pragma unroll
        for (int i = 0; i < Shape::SEEN_ROWS; i += AT_ONCE, source += stride) {
            const unsigned char* vector = source;
            if (!Shape::ROWS_ALIGNED)
                vector = reinterpret_cast<const unsigned char*>(reinterpret_cast<unsigned long long>(source) & ~15ULL);
            if (i + AT_ONCE <= Shape::SEEN_ROWS || to < LAST)
                copy_16_bytes<256>(samples + to + slot + i * Shape::PITCH, vector);
        }
    }

    // A vector of a row, from byte `sample` on. Rows beyond an edge of unaligned images come from rows shifted otherwise.
    __device__ void fetch_vector(unsigned char* vector, int row, int sample) const {
        const unsigned fill = picture.fill * 0x01010101u;
        const unsigned char* source = plane + offsets[row] + sample;
        if (offsets[row] < 0) *reinterpret_cast<uint4*>(vector) = make_uint4(fill, fill, fill, fill);
        else if (Shape::ROWS_ALIGNED || reinterpret_cast<unsigned long long>(source) % 16 == 0) copy_16_bytes(vector, source);
        else *reinterpret_cast<uint4*>(vector) = load_anywhere(source);
    }

    // The same chunk if part of it lies beyond the ends of rows.
    __device__ void fetch_bytes(int x, int slot) const {
        constexpr int BESIDE = Shape::ROWS_ALIGNED ? 0 : 15;  // of a vector
        const int reach = Shape::LEAD * CHANNELS;
#pragma unroll 1
        for (int i = threadIdx.x; i < Shape::SEEN_ROWS * Shape::A_ROW; i += TENSOR_THREADS) {
            const int row = i / Shape::A_ROW, at = i % Shape::A_ROW * 16, sample = x * CHANNELS + at - shift_of(row);
            unsigned char* vector = samples + row * Shape::PITCH + slot + at;
            if (sample >= BESIDE && sample + 16 + BESIDE <= picture.row_samples) fetch_vector(vector, row, sample);
            else if (sample + 16 > -reach && sample < picture.row_samples + reach)  // no window sees farther out
#pragma unroll 1
                for (int k = 0; k < 16; ++k) vector[k] = byte_at(offsets[row], sample + k);
        }
    }

    // Byte `at` of the row that begins at `offset`.
    __device__ unsigned char byte_at(long long offset, int at) const {
        const int shifted = at + 256 * CHANNELS;  // never negative
        const int position = border_index(shifted / CHANNELS - 256, picture.columns, picture.mode_x);
        return position < 0 || offset < 0 ? picture.fill : __ldg(plane + offset + position * CHANNELS + shifted % CHANNELS);
    }
};

// How a warp writes its rows of chunks of results: each lane writes one vector of every AT_ONCE rows. Unaligned results lie
// in `results` as many words behind CARRIED as they will in their units of memory, and are shifted by the bytes that remain.
// Only whole units are written; the rest of a chunk stays for the next.
template <typename Shape, int CHANNELS>
struct TensorOutput {
    static constexpr int AT_ONCE = 32 / Shape::VECTORS;  // rows
    unsigned char* results;
    unsigned char* out;
    long long first;  // the start of the warp's first row in `out`
    int rows;         // to write
    int from, end;    // of the lane's first vector in `results`, and of rows that are not written
    unsigned half;    // of a unit: its vector's first byte
    long long to;     // of the vector in `out`, in the chunk at position 0
    long long stride;

    __device__ TensorOutput(unsigned char* results, unsigned char* out, long long first, int rows, const Picture& picture)
        : results(results), out(out), first(first), rows(rows), stride(picture.out_row_samples) {
        const int row = threadIdx.x % 32 / Shape::VECTORS, at = threadIdx.x % 32 % Shape::VECTORS * 16;
        end = opaque(min(rows, 16) * Shape::RESULT_PITCH);
        from = opaque(row < AT_ONCE ? row * Shape::RESULT_PITCH + Shape::CARRIED + at : Shape::RESULTS);
        to = opaque(first + row * stride + at);
        half = opaque(at % Shape::UNIT);
    }

    // Bytes in front of the row's results at position `x` in their unit.
    __device__ int shift_of(int row, int x) const {
        if (Shape::ROWS_ALIGNED) return 0;
        return reinterpret_cast<unsigned long long>(out + first + row * stride + x * CHANNELS) % Shape::UNIT;
    }

    // Writes the chunk of results at position `x`, of those from `x_begin` to `x_end`.
    __device__ void store(int x, int x_begin, int x_end) const {
        const bool whole = Shape::ROWS_ALIGNED ? x + Shape::CHUNK <= x_end : x > x_begin && x + Shape::CHUNK < x_end;
        if (whole) {
            unsigned char* target = out + to + x * CHANNELS;
#pragma unroll
            for (int i = 0; i < 16; i += AT_ONCE, target += AT_ONCE * stride)
                store_vector(target, from + i * Shape::RESULT_PITCH);
        } else {
            store_ends(x, x_begin, x_end);
        }
        if constexpr (!Shape::ROWS_ALIGNED) carry();
    }

    // The vector of results at `at`, if it is before `end`.
    __device__ void store_vector(unsigned char* target, int at) const {
        const unsigned* words = reinterpret_cast<const unsigned*>(results + min(at, Shape::RESULTS - 16));
        uint4 vector = *reinterpret_cast<const uint4*>(words);
        if constexpr (!Shape::ROWS_ALIGNED) {
            const unsigned place = static_cast<unsigned>(reinterpret_cast<unsigned long long>(target));
            const unsigned past = (Shape::UNIT == 16 ? place : place ^ half) % Shape::UNIT, bits = past % 4 * 8;
            vector = make_uint4(__funnelshift_l(words[-1], vector.x, bits), __funnelshift_l(vector.x, vector.y, bits),
                                __funnelshift_l(vector.y, vector.z, bits), __funnelshift_l(vector.z, vector.w, bits));
            target -= past;
        }
        store_16_bytes_if(at < end, target, vector);
    }

    // The same where results begin or end.
    __device__ void store_ends(int x, int x_begin, int x_end) const {
        const int bytes = min(x_end - x, Shape::CHUNK) * CHANNELS, lane = threadIdx.x % 32;
        const bool begins = x == x_begin;
#pragma unroll 1
        for (int i = 0; i < 16; i += AT_ONCE) {
            const int row = lane / Shape::VECTORS + i, at = lane % Shape::VECTORS * 16, shift = shift_of(row, x);
            if (at + 16 <= shift + bytes && (at >= shift || !begins))
                store_vector(out + to + x * CHANNELS + i * stride, from + i * Shape::RESULT_PITCH);
        }
        // Two lanes a row write the bytes before and behind these vectors.
        const int row = lane % 16, shift = shift_of(row, x), last = min((shift + bytes) / 16, Shape::VECTORS) * 16 - shift;
        unsigned char* line = out + first + row * stride + x * CHANNELS;
        const unsigned char* result = results + row * Shape::RESULT_PITCH + Shape::CARRIED + shift / 4 * 4;
        if (row >= rows) return;
#pragma unroll 1
        for (int i = lane / 16; begins && i < min(-shift & 15, bytes); i += 2) line[i] = result[i];
#pragma unroll 1
        for (int i = (begins ? max(last, 0) : last) + lane / 16; x + Shape::CHUNK >= x_end && i < bytes; i += 2)
            line[i] = result[i];
    }

    // Moves what was not written to where the next chunk's results continue it, with the word before: a lane each vector.
    __device__ void carry() const {
        unsigned char* row = results + threadIdx.x % 16 * Shape::RESULT_PITCH + Shape::CARRIED;
        uint4* vectors = reinterpret_cast<uint4*>(row) + threadIdx.x % 32 / 16;
        uint4 vector;
        if (threadIdx.x % 32 < Shape::UNIT) vector = vectors[Shape::VECTORS];
        const unsigned before = *reinterpret_cast<const unsigned*>(row + Shape::CHUNK_BYTES - 4);
        __syncwarp();
        if (threadIdx.x % 32 < Shape::UNIT) *vectors = vector;
        if (threadIdx.x % 32 < 16) *reinterpret_cast<unsigned*>(row - 4) = before;
    }
};

// The rows that a lane reads in each block, 2 (lane % 4), the next, and those 8 below: where its first samples in a slot are,
// from which word on, and how many bits behind (of single channels, which are read as bytes, from which byte on).
template <typename Shape, int CHANNELS>
struct TensorRows {
    static constexpr int COUNT = Shape::ROWS_ALIGNED ? 1 : 4;  // aligned rows follow from the first
    int at[COUNT];
    unsigned bits[COUNT];

    __device__ TensorRows(const TensorInput<Shape, CHANNELS>& input) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 4 * 2, position = threadIdx.x % 32 / 4 * 2;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int mine = row + i % 2 + i / 2 * 8, first = position * CHANNELS + input.shift_of(mine);
            at[i] = opaque(mine * Shape::PITCH + (Shape::ROWS_ALIGNED || CHANNELS == 1 ? first : first & ~3));
            bits[i] = opaque(first % 4 * 8);
        }
    }
};

// Two positions of four rows, from `samples` on: four rows of each channel of each position in a word.
template <typename Shape, int CHANNELS>
__device__ inline void columns_of(unsigned (&columns)[2][CHANNELS], const unsigned char* samples,
                                  const TensorRows<Shape, CHANNELS>& rows) {
    if constexpr (!Shape::ROWS_ALIGNED && CHANNELS == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            columns[i][0] = __byte_perm(__byte_perm(samples[rows.at[0] + i], samples[rows.at[1] + i], 0x0040),
                                        __byte_perm(samples[rows.at[2] + i], samples[rows.at[3] + i], 0x0040), 0x5410);
        return;
    }
    constexpr int WORDS = (CHANNELS + 1) / 2;
    unsigned word[4][WORDS];  // unaligned: of each row
    if constexpr (!Shape::ROWS_ALIGNED) {
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const unsigned* from = reinterpret_cast<const unsigned*>(samples + rows.at[row]);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[row][i] = __funnelshift_r(from[i], from[i + 1], rows.bits[row]);
        }
    }
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        unsigned pairs[2];  // of rows, of two samples
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (Shape::ROWS_ALIGNED) {
                const unsigned char* two = samples + 8 * half * Shape::PITCH + 2 * i;
                pairs[half] = __byte_perm(*reinterpret_cast<const unsigned short*>(two),
                                          *reinterpret_cast<const unsigned short*>(two + Shape::PITCH), 0x5140);
            } else {
                pairs[half] = __byte_perm(word[2 * half][i / 2], word[2 * half + 1][i / 2], i % 2 ? 0x7362 : 0x5140);
            }
        }
        columns[2 * i / CHANNELS][2 * i % CHANNELS] = __byte_perm(pairs[0], pairs[1], 0x5410);
        columns[(2 * i + 1) / CHANNELS][(2 * i + 1) % CHANNELS] = __byte_perm(pairs[0], pairs[1], 0x7632);
    }
}

// Sums 16 columns of all channels: `sums` are the high and the low bytes of v, as left factors of the next product. The lane
// reads two positions of its rows, from `samples` on.
template <typename Shape, int CHANNELS>
__device__ inline void sum_down(unsigned (&sums)[CHANNELS][2][2], const unsigned char* samples,
                                const TensorRows<Shape, CHANNELS>& rows, const unsigned (&weights)[2][Shape::SEEN][2],
                                int shift) {
    unsigned columns[2][CHANNELS][Shape::SEEN];  // four rows of each position
#pragma unroll
    for (int block = 0; block < Shape::SEEN; ++block) {
        unsigned of_block[2][CHANNELS];
        columns_of<Shape, CHANNELS>(of_block, samples + 16 * block * Shape::PITCH, rows);
#pragma unroll
        for (int i = 0; i < 2 * CHANNELS; ++i)
            columns[i / CHANNELS][i % CHANNELS][block] = of_block[i / CHANNELS][i % CHANNELS];
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        int sum[2][4] = {};
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            multiply_add<BytesByBytes>(sum[place], weights[0], columns[place][c]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[place][i] <<= shift;
            multiply_add<SignedByBytes>(sum[place], weights[1], columns[place][c]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const unsigned first = __byte_perm(sum[0][2 * row], sum[1][2 * row], 0x6251);
            const unsigned second = __byte_perm(sum[0][2 * row + 1], sum[1][2 * row + 1], 0x6251);
            sums[c][0][row] = __byte_perm(first, second, 0x7632);
            sums[c][1][row] = __byte_perm(first, second, 0x5410);
        }
    }
}

template <bool ALIGNED, int CHANNELS>
__device__ inline void put(unsigned char* to, const unsigned (&word)[CHANNELS]) {
    if constexpr (ALIGNED && CHANNELS == 4) *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    else if constexpr (ALIGNED && CHANNELS == 2) *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    else
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) reinterpret_cast<unsigned*>(to)[i] = word[i];
}

// Sums 16 positions of all channels along their rows, from SEEN blocks of which `oldest` is the first. The lane's first four
// positions of its two rows go to `to`.
template <typename Shape, int CHANNELS>
__device__ inline void sum_across(unsigned char* const (&to)[2], const unsigned (&blocks)[CHANNELS][2][Shape::SEEN][2],
                                  int oldest, const unsigned (&weights)[2][2][Shape::SEEN], int unit, int bias) {
    int sum[CHANNELS][2][4] = {};
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            // The weights are turned instead of the blocks, of which pairs then stay in neighbouring registers.
            unsigned upper[Shape::SEEN], lower[Shape::SEEN];
#pragma unroll
            for (int block = 0; block < Shape::SEEN; ++block) {
                upper[block] = weights[0][part][(block - oldest + Shape::SEEN) % Shape::SEEN];
                lower[block] = weights[1][part][(block - oldest + Shape::SEEN) % Shape::SEEN];
            }
            multiply_add<BytesByBytes>(sum[c][part], blocks[c][0], upper);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[c][part][i] = sum[c][part][i] * unit + bias;
            multiply_add<BytesBySigned>(sum[c][part], blocks[c][0], lower);
            multiply_add<BytesByBytes>(sum[c][part], blocks[c][1], upper);
        }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        unsigned word[CHANNELS];
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) {
            unsigned four[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int place = (4 * i + j) / CHANNELS, c = (4 * i + j) % CHANNELS;
                four[j] = sum[c][place / 2][2 * row + place % 2];
            }
            word[i] = __byte_perm(__byte_perm(four[0], four[1], 0x0062), __byte_perm(four[2], four[3], 0x0062), 0x5410);
        }
        put<Shape::ROWS_ALIGNED>(to[row], word);
    }
}

template <int CHANNELS, int RADIUS, bool ALIGNED>
__global__ void __launch_bounds__(TENSOR_THREADS, Tensor<CHANNELS, RADIUS, ALIGNED>::BLOCKS)
tensor(const unsigned char* __restrict__ in, unsigned char* __restrict__ out, Picture picture,
       const __grid_constant__ TensorFilter filter, BlockPartition tiles) {
    typedef Tensor<CHANNELS, RADIUS, ALIGNED> Shape;
    constexpr int SEEN = Shape::SEEN, CHUNK = Shape::CHUNK;
    extern __shared__ __align__(16) unsigned char shared[];
    long long* offsets = reinterpret_cast<long long*>(shared);
    unsigned char* samples = shared + Shape::SEEN_ROWS * 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    TensorFilter& weights = *reinterpret_cast<TensorFilter*>(samples + Shape::SEEN_ROWS * Shape::PITCH);
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
    // Lanes read different weights, which constant memory would serve one by one.
    for (int i = threadIdx.x; i < sizeof(TensorFilter) / 4; i += TENSOR_THREADS)
        reinterpret_cast<unsigned*>(&weights)[i] = reinterpret_cast<const unsigned*>(&filter)[i];
    __syncthreads();
    int x_next = x_begin + picture.centre_x / CHANNELS - 16 - Shape::LEAD, next = 0, slot = 0;  // to be fetched
    const TensorInput<Shape, CHANNELS> input(samples, in_plane, offsets, first, x_next, picture);
    const long long first_line = (area.plane * picture.out_rows + warp_y) * picture.out_row_samples;
    const TensorOutput<Shape, CHANNELS> output(results, out, first_line, picture.out_rows - warp_y, picture);

    const int turns = (x_end - x_begin + CHUNK - 1) / CHUNK, chunks = turns + Shape::SLOTS - 1;
    const auto fetch = [&] {
        if (next++ < chunks) input.fetch(x_next, slot);
        x_next += CHUNK, slot = slot == (Shape::SLOTS - 1) * Shape::SLOT ? 0 : slot + Shape::SLOT;
    };
#pragma unroll
    for (int i = 1; i < Shape::SLOTS; ++i) fetch();

    // Factors: down, the weights of rows k for result m; across, of positions k for result n. Rows and positions alternate
    // between the two halves of a block, and results are ordered so that a lane gets four neighbours.
    const auto weight_of = [](const auto* half, int distance) {
        return abs(distance) <= RADIUS ? static_cast<unsigned>(half[abs(distance)]) & 0xFFu : 0u;
    };
    unsigned down[2][SEEN][2], across[2][2][SEEN];
#pragma unroll
    for (int block = 0; block < SEEN; ++block)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 16 * block + 2 * place - (group + 8 * i) - RADIUS;
            const int position = 16 * block + 4 * place - (group / 2 * 4 + 2 * i + group % 2) - RADIUS;
            unsigned four[4] = {};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                four[0] |= weight_of(weights.y.upper, row + k % 2 + k / 2 * 8) << 8 * k;
                four[1] |= weight_of(weights.y.lower, row + k % 2 + k / 2 * 8) << 8 * k;
                four[2] |= weight_of(weights.x.upper, position + k) << 8 * k;
                four[3] |= weight_of(weights.x.lower, position + k) << 8 * k;
            }
            down[0][block][i] = opaque(four[0]), down[1][block][i] = opaque(four[1]);
            across[0][i][block] = opaque(four[2]), across[1][i][block] = opaque(four[3]);
        }

    unsigned blocks[CHANNELS][2][SEEN][2];  // high and low bytes of v
    const TensorRows<Shape, CHANNELS> rows(input);
    // Aligned rows are read from `at` on, others at their places behind it.
    int at = opaque((16 + Shape::SURPLUS) * CHANNELS + (ALIGNED ? rows.at[0] : 0));
    const int end = opaque(Shape::RING + (ALIGNED ? (16 * warp + 2 * place) * Shape::PITCH : 0));
    int result[2] = {opaque(Shape::CARRIED + group * Shape::RESULT_PITCH + 4 * place * CHANNELS)};  // of the lane's rows
    result[1] = result[0] + 8 * Shape::RESULT_PITCH;
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < 2; ++i) result[i] = opaque(result[i] + (output.shift_of(group + 8 * i, x_begin) / 4 * 4));
    }
    const int shift = filter.shift, unit = CHANNELS == 1 ? filter.unit : 256, bias = filter.bias;
    const auto sum_block = [&](int block, int at, bool at_end) {  // at_end: may wrap
        if (at_end && at >= end) at -= Shape::RING;
        unsigned sums[CHANNELS][2][2];
        sum_down<Shape>(sums, samples + at, rows, down, shift);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) blocks[c][i / 2][block][i % 2] = sums[c][i / 2][i % 2];
    };
    wait_for_copies();
    __syncthreads();
    fetch();
#pragma unroll
    for (int block = 0; block < SEEN - 1; ++block, at += 16 * CHANNELS) sum_block(block, at, false);
    at += Shape::SLOT - Shape::CHUNK_BYTES;
#pragma unroll 1
    for (int x = x_begin; x < x_end; x += CHUNK) {
        wait_for_copies();
        __syncthreads();  // this turn's chunks are visible, and the last turn's have been read
        fetch();
#pragma unroll
        for (int phase = 0; phase < SEEN; ++phase, at += 16 * CHANNELS) {
            sum_block((SEEN - 1 + phase) % SEEN, at, Shape::SURPLUS > 0 && phase == SEEN - 1);
            unsigned char* const first = results + phase * 16 * CHANNELS;
            unsigned char* const to[2] = {first + result[0], first + result[1]};
            sum_across<Shape>(to, blocks, phase, across, unit, bias);
        }
        at += Shape::SLOT - Shape::CHUNK_BYTES;
        if (at >= end) at -= Shape::RING;
        __syncwarp();
        output.store(x, x_begin, x_end);
    }
}
