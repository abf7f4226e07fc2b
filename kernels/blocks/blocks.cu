// Blocks of compressed files: decoded bytes become samples of a region, and samples become bytes to encode.
//
// Contract: a file's chunk is an array of at most AXES axes in C order, cut into blocks of bytes. A block's bytes may be
// shuffled: element e of `typesize` bytes has its byte j at j * n + e of n elements (Blosc's byte shuffle), or bit b of
// that byte in bit e % 8 of byte (8 j + b) * n / 8 + e / 8 (its bit shuffle, only if n is a multiple of 8).
// Bytes beyond whole elements stay where they are. Source: c-blosc 1.21, README_CHUNK_FORMAT.rst and its shuffles.
//
// Floor on an H200: a sample is read and written once, 4.2 TB/s; the bus that brings it carries 0.05 TB/s.
//
// Every kernel is a template, so NVRTC compiles only the one that is asked for: 1 to 6 s of a core, 40 s for all of the file.
//
//   decode_lz4     : a warp a stream (lz4.cuh)
//   decode_zlib    : a warp a stream (zlib.cuh)
//   encode_lz4, encode_zstd : a warp a stream (lz4.cuh, zstd_encode.cuh)
//   scan_zstd, decode_zstd, execute_zstd : frames, one kernel after another (zstd_decode.cuh)
//   add_rows<T>    : differences along rows to samples (TIFF's horizontal predictor), a warp a row
//   copy_streams   : bytes that the file holds as they are
//   place<T>       : a thread a sample, from its block to its place in the region; samples outside it are skipped
//   cut<T>         : a thread a sample, from the region to its shuffled block
//   measure_chunks : where the encoded streams go in Blosc chunks, and the chunks' sizes; one thread block in all
//   pack_chunks<T> : writes Blosc chunks one behind another: headers, tables of blocks, streams with their lengths

using i64 = long long;
using u64 = unsigned long long;
using u8 = unsigned char;

constexpr int AXES = 6;
constexpr int NO_SHUFFLE = 0, BYTES = 1;
constexpr i64 FILL = -1;

// Streams of bytes: four arrays of `count` words, the last two of which are where a stream goes and its bytes there.
struct Streams {
    u64 *sources, *source_bytes, *targets, *target_bytes;
};

struct Block {
    i64 source;    // offset of its bytes; FILL: every sample has the fill value
    i64 first;     // its first byte's offset in the chunk
    int bytes;
    int chunk;
    int typesize;
    int shuffle;   // NO_SHUFFLE, BYTES or bits
};

#include "lz4.cuh"
#include "zlib.cuh"
#include "zstd_encode.cuh"
#include "zstd_decode.cuh"

// The axes of chunk and region, padded with leading ones; strides of the region's array in samples.
struct Placing {
    i64 strides[AXES];
    u64 fill;
    int chunk[AXES];
    int region[AXES];
};

template <int = 0>
__global__ void copy_streams(Streams streams) {
    const u8* source = reinterpret_cast<const u8*>(streams.sources[blockIdx.x]);
    u8* target = reinterpret_cast<u8*>(streams.targets[blockIdx.x]);
    u64 bytes = streams.target_bytes[blockIdx.x], step = u64(gridDim.y) * blockDim.x;
    for (u64 i = u64(blockIdx.y) * blockDim.x + threadIdx.x; i < bytes; i += step) target[i] = source[i];
}

// Blocks of rows of `columns` pixels of `samples`, aligned to a sample.
template <typename T>
__global__ void add_rows(u8* decoded, const Block* blocks, int columns, int samples) {
    const Block b = blocks[blockIdx.x];
    if (b.source == FILL) return;
    int length = columns * samples, rows = b.bytes / (length * sizeof(T)), lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int row = blockIdx.y * warps + threadIdx.x / 32; row < rows; row += gridDim.y * warps) {
        T* line = reinterpret_cast<T*>(decoded + b.source) + i64(row) * length;
        for (int sample = 0; sample < samples; ++sample) {
            T before = 0;
            for (int first = 0; first < columns; first += 32) {
                T* at = line + i64(first + lane) * samples + sample;
                bool is_inside = first + lane < columns;
                T sum = is_inside ? *at : T(0);
                for (int by = 1; by < 32; by *= 2) {
                    T other = __shfl_up_sync(ALL_LANES, sum, by);
                    if (lane >= by) sum += other;
                }
                sum += before;
                if (is_inside) *at = sum;
                before = __shfl_sync(ALL_LANES, sum, 31);
            }
        }
    }
}

__device__ u8 byte_of(const u8* block, const Block& b, unsigned k) {
    if (b.shuffle == NO_SHUFFLE) return block[k];
    unsigned size = b.typesize, n = b.bytes / size;
    if (k >= n * size || (b.shuffle != BYTES && n % 8)) return block[k];
    unsigned e = k / size, j = k % size;
    if (b.shuffle == BYTES) return block[j * n + e];
    u8 value = 0;
    for (unsigned bit = 0; bit < 8; ++bit) value |= ((block[(8 * j + bit) * (n / 8) + e / 8] >> (e % 8)) & 1) << bit;
    return value;
}

// Offset of a chunk's sample in the region, or a negative number outside it.
__device__ i64 target_of(unsigned sample, const int* origin, const Placing& placing) {
    i64 at = 0;
    bool inside = true;
    for (int axis = AXES - 1; axis >= 0; --axis) {
        unsigned length = placing.chunk[axis], quotient = sample / length;
        i64 place = i64(sample - quotient * length) + origin[axis];
        inside = inside && place >= 0 && place < placing.region[axis];
        at += place * placing.strides[axis];
        sample = quotient;
    }
    return inside ? at : -1;
}

// origins: of each chunk, AXES numbers: its first sample's place in the region, perhaps negative
template <typename T>
__global__ void place(const u8* decoded, const Block* blocks, const int* origins, T* region, Placing placing) {
    const Block b = blocks[blockIdx.x];
    unsigned count = b.bytes / sizeof(T), first = b.first / sizeof(T);
    for (unsigned i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += gridDim.y * blockDim.x) {
        i64 at = target_of(first + i, origins + AXES * b.chunk, placing);
        if (at < 0) continue;
        u64 value = placing.fill;
        if (b.source != FILL) {
            value = 0;
            for (unsigned j = 0; j < sizeof(T); ++j)
                value |= u64(byte_of(decoded + b.source, b, i * sizeof(T) + j)) << (8 * j);
        }
        region[at] = T(value);
    }
}

// Samples beyond the region have the fill value.
template <typename T>
__global__ void cut(const T* region, const Block* blocks, const int* origins, u8* shuffled, Placing placing) {
    const Block b = blocks[blockIdx.x];
    unsigned count = b.bytes / sizeof(T), first = b.first / sizeof(T);
    u8* block = shuffled + b.source;
    for (unsigned i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += gridDim.y * blockDim.x) {
        i64 at = target_of(first + i, origins + AXES * b.chunk, placing);
        u64 value = at < 0 ? placing.fill : region[at];
        for (unsigned j = 0; j < sizeof(T); ++j)
            block[b.shuffle == BYTES ? j * count + i : i * sizeof(T) + j] = u8(value >> (8 * j));
    }
}

// Chunks of one shape. A block has `splits` streams, except a shorter last block, which has one.
struct Packing {
    u64 nbytes;       // of a chunk
    u64 capacity;     // for all packed chunks
    u64 room;         // of each encoded stream
    int chunks;
    int streams;      // of a chunk
    int blocks;       // of a chunk
    int block_bytes;
    int splits;
    int typesize;
    int flags;        // of Blosc's header
};

constexpr unsigned HEADER = 16, STORED = 2, VERSION = 2, CODEC_VERSION = 1;

__device__ u64 stream_bytes(int block, const Packing& p) {
    u64 left = p.nbytes - u64(block) * p.block_bytes;
    return left < p.block_bytes ? left : p.block_bytes / p.splits;
}

__device__ int block_of(int stream, const Packing& p) { return min(stream / p.splits, p.blocks - 1); }

// A stream that did not shrink is stored as it is.
__device__ u64 packed_bytes(u64 encoded, int status, u64 bytes) { return status == 0 && encoded < bytes ? encoded : bytes; }

// offsets: of each stream's length in its chunk; starts: of the chunks; sizes: of the chunks, and then of all, or -1 if
// they do not fit. A chunk that would not shrink takes nbytes + HEADER and is stored as it is.
template <int = 0>
__global__ void measure_chunks(
    const u64* encoded, const int* statuses, Packing p, u64* offsets, i64* starts, i64* sizes
) {
    for (int chunk = threadIdx.x; chunk < p.chunks; chunk += blockDim.x) {
        u64 at = HEADER + 4 * p.blocks;
        for (int s = 0; s < p.streams; ++s) {
            i64 index = i64(chunk) * p.streams + s;
            offsets[index] = at;
            at += 4 + packed_bytes(encoded[index], statuses[index], stream_bytes(block_of(s, p), p));
        }
        sizes[chunk] = min(at, p.nbytes + HEADER);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    i64 total = 0;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
        starts[chunk] = total;
        total += sizes[chunk];
    }
    sizes[p.chunks] = u64(total) <= p.capacity ? total : -1;
}

__device__ void put(u8* at, unsigned value) {
    for (int j = 0; j < 4; ++j) at[j] = u8(value >> (8 * j));
}

struct Packed {
    const u8 *shuffled, *encoded;  // each chunk's blocks, `stride` bytes apart; each stream's room
    const u64* encoded_bytes;
    const int* statuses;
    const u64* offsets;
    const i64 *starts, *sizes;
    u8* out;
    u64 stride;
};

template <typename T>
__global__ void pack_chunks(const T* region, const int* origins, Placing placing, Packing p, Packed packed) {
    if (packed.sizes[p.chunks] < 0) return;
    i64 index = blockIdx.x;
    int chunk = index / p.streams, s = index % p.streams, block = block_of(s, p), split = s - block * p.splits;
    u8* out = packed.out + packed.starts[chunk];
    bool stored = packed.sizes[chunk] == p.nbytes + HEADER;
    unsigned first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (first == 0 && s == 0) {
        put(out, VERSION | CODEC_VERSION << 8 | (p.flags | (stored ? STORED : 0)) << 16 | p.typesize << 24);
        put(out + 4, p.nbytes);
        put(out + 8, p.block_bytes);
        put(out + 12, packed.sizes[chunk]);
    }
    if (stored) {
        if (split > 0) return;
        u64 begin = u64(block) * p.block_bytes, left = p.nbytes - begin;
        unsigned count = (left < p.block_bytes ? left : p.block_bytes) / sizeof(T);
        for (unsigned i = first; i < count; i += step) {
            i64 at = target_of(begin / sizeof(T) + i, origins + AXES * chunk, placing);
            u64 value = at < 0 ? placing.fill : region[at];
            for (unsigned j = 0; j < sizeof(T); ++j) out[HEADER + begin + i * sizeof(T) + j] = u8(value >> (8 * j));
        }
        return;
    }
    u64 bytes = stream_bytes(block, p), offset = packed.offsets[index];
    u64 count = packed_bytes(packed.encoded_bytes[index], packed.statuses[index], bytes);
    if (first == 0) {
        if (split == 0) put(out + HEADER + 4 * block, offset);
        put(out + offset, count);
    }
    const u8* source = count < bytes ? packed.encoded + index * p.room
                                     : packed.shuffled + chunk * packed.stride + u64(block) * p.block_bytes + split * bytes;
    for (u64 i = first; i < count; i += step) out[offset + 4 + i] = source[i];
}
