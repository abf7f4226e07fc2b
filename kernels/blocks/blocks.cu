// Blocks of compressed files: decoded bytes become samples of a region, and samples become bytes to encode.
//
// Contract: a file's chunk is an array of at most AXES axes in C order, cut into blocks of bytes. A block's bytes may be
// shuffled: element e of `typesize` bytes has its byte j at j * n + e of n elements (Blosc's byte shuffle), or bit b of
// that byte in bit e % 8 of byte (8 j + b) * n / 8 + e / 8 (its bit shuffle, only if n is a multiple of 8).
// Bytes beyond whole elements stay where they are. Source: c-blosc 1.21, README_CHUNK_FORMAT.rst and its shuffles.
//
// Floor on an H200: a sample is read and written once, 4.2 TB/s; the bus that brings it carries 0.05 TB/s.
//
//   copy_streams   : bytes that the file holds as they are
//   check_streams  : the first stream that did not decode to its size
//   place<T>       : a thread a sample, from its block to its place in the region; samples outside it are skipped

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

// The axes of chunk and region, padded with leading ones; strides of the region's array in samples.
struct Placing {
    i64 strides[AXES];
    u64 fill;
    int chunk[AXES];
    int region[AXES];
};

extern "C" __global__ void copy_streams(Streams streams) {
    const u8* source = reinterpret_cast<const u8*>(streams.sources[blockIdx.x]);
    u8* target = reinterpret_cast<u8*>(streams.targets[blockIdx.x]);
    u64 bytes = streams.target_bytes[blockIdx.x], step = u64(gridDim.y) * blockDim.x;
    for (u64 i = u64(blockIdx.y) * blockDim.x + threadIdx.x; i < bytes; i += step) target[i] = source[i];
}

// `fault` becomes the smallest index of a stream that failed; it is larger than every index before.
extern "C" __global__ void check_streams(
    Streams streams, const int* statuses, const u64* decoded, int count, int* fault
) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && (statuses[i] != 0 || decoded[i] != streams.target_bytes[i])) atomicMin(fault, i);
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
