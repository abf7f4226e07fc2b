// How a block of `fused` holds its tile: samples as they came and sums in shared memory. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "windows.cuh"

__host__ __device__ constexpr int up_to(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

template <typename Sample, int CHANNELS, int RADIUS, int KIND>
struct Fused {
    static constexpr bool FLOATS = same<Sample, float>;
    static constexpr int THREADS = 128, WIDTH = 4 * THREADS;  // samples of a row that a block loads, four a thread
    // Rows that a block goes down at a time: many, since each step costs two barriers and moves the window's rows, but the
    // loop, about 4 * (4 RADIUS + 9) * STEP instructions, has to stay in the instruction cache.
    static constexpr int STEP = FLOATS || RADIUS > 4 ? 8 : 16;
    static constexpr int SEGMENT = 4 * STEP;  // samples of a row that a thread filters along it
    // Where a step's samples wait: with one place the next are fetched once all columns are summed.
    static constexpr int STAGES = FLOATS && RADIUS <= 4 ? 2 : 1;
    // On a multiprocessor, as registers allow.
    static constexpr int BLOCKS = RADIUS > 4 && (sizeof(Sample) == 2 || (FLOATS && CHANNELS > 1)) ? 3 : 4;

    static constexpr int VECTOR = 16 / sizeof(Sample), SECTOR = SECTOR_BYTES / sizeof(Sample);
    // Loads begin at a sector (half a sector off, an H200's L2 reads 1.6 times as much), but for bytes, where that would
    // cost too many columns.
    static constexpr int REACH = RADIUS * CHANNELS, HALO = up_to(REACH, sizeof(Sample) == 1 ? VECTOR : SECTOR);
    static constexpr int OUTPUTS = (WIDTH - 2 * HALO) / SECTOR * SECTOR;

    // Sums of a row stand in runs, one a segment; runs begin 4 words apart modulo 32 or nearly so, so that the lanes of a
    // warp, which read the quads of neighbouring segments, meet all banks.
    static constexpr bool PAIRED = KIND == SQUARE && sizeof(Sample) == 1;  // two sums a word
    static constexpr int A_WORD = PAIRED ? 2 : 1, LANES = 4 / A_WORD;
    static constexpr int RUN = SEGMENT / A_WORD + 4, PLACES = WIDTH + 2 * HALO + 8;  // read beyond the end, not used
    static constexpr int PITCH = up_to(PLACES / SEGMENT * RUN + PLACES % SEGMENT / A_WORD, 4);
    // Bytes of shared memory: samples, sums, where columns come from.
    static constexpr int SAMPLES = STEP * WIDTH * static_cast<int>(sizeof(Sample)), SUMS = STEP * PITCH * 4;
};

// Which places of a row 16-byte copies cannot bring (0 … left and right … right + count - left), and where the samples of
// those come from (-1: beyond the edge).
struct Sources {
    int left, right, count;
    int source[1];
};

// Fills in `sources`. `x` is where the tile's first place comes from; so many places are `needed`.
template <typename Shape, int CHANNELS>
__device__ inline void find_sources(Sources* sources, int x, int needed, const Picture& picture) {
    if (threadIdx.x == 0) {
        int left = needed, right = needed;
        if (picture.aligned_in) {
            left = min(up_to(max(-x, 0), Shape::VECTOR), needed);
            right = max(left, min(needed, (picture.row_samples - x) / Shape::VECTOR * Shape::VECTOR));
        }
        sources->left = left, sources->right = right, sources->count = left + needed - right;
    }
    for (int i = threadIdx.x; i < needed; i += Shape::THREADS) {
        const int shifted = x + i + 1024 * CHANNELS;  // never negative
        const int from = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
        sources->source[i] = from < 0 ? -1 : from * CHANNELS + shifted % CHANNELS;
    }
}

// Fetches COUNT rows from `position` on of the tile whose first place comes from `x`. `whole`: nothing of it lies beyond
// the left or right edge, and copies may bring all.
template <typename Shape, int COUNT, typename Sample>
__device__ inline void fetch_rows(Sample* samples, const Sample* plane, int position, int x, bool whole,
                                  const Sources* sources, const Picture& picture) {
    constexpr int WIDTH = Shape::WIDTH, A_ROW = WIDTH / Shape::VECTOR, AT_ONCE = Shape::THREADS / A_ROW;
    const int row = threadIdx.x / A_ROW, at = threadIdx.x % A_ROW * Shape::VECTOR;
    const long long row_samples = picture.row_samples;
    const bool inside = position >= 0 && position + COUNT <= picture.rows;
    if (inside && whole) {
        const Sample* from = plane + (position + row) * row_samples + x + at;
#pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE, from += AT_ONCE * row_samples)
            if (COUNT % AT_ONCE == 0 || i + row < COUNT) copy_16_bytes(samples + (i + row) * WIDTH + at, from);
        return;
    }
    Sample fill;
    if constexpr (same<Sample, float>) fill = __uint_as_float(picture.fill);
    else fill = static_cast<Sample>(picture.fill);
    const auto source_row = [&](int i) {
        return inside ? position + i : border_index(position + i, picture.rows, picture.mode_y);
    };
    if (picture.aligned_in && x + at >= 0 && x + at + Shape::VECTOR <= picture.row_samples) {
#pragma unroll 1
        for (int i = row; i < COUNT; i += AT_ONCE) {
            const int from = source_row(i);
            if (from >= 0) copy_16_bytes(samples + i * WIDTH + at, plane + from * row_samples + x + at);
            else
                for (int j = 0; j < Shape::VECTOR; ++j) samples[i * WIDTH + at + j] = fill;
        }
    }
    if (whole) return;
    // The rest one by one, each warp some rows, all loads made before any is waited for.
    constexpr int WARPS = Shape::THREADS / 32, OF_A_WARP = (COUNT + WARPS - 1) / WARPS;
    const int warp = threadIdx.x / 32, left = sources->left, right = sources->right, count = sources->count;
    int rows[OF_A_WARP];
#pragma unroll
    for (int i = 0; i < OF_A_WARP; ++i) rows[i] = source_row(min(warp + i * WARPS, COUNT - 1));
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < count; k += 32) {
        const int place = k < left ? k : right + k - left, source = sources->source[place];
        Sample found[OF_A_WARP];
#pragma unroll
        for (int i = 0; i < OF_A_WARP; ++i) found[i] = __ldg(plane + max(rows[i], 0) * row_samples + max(source, 0));
#pragma unroll
        for (int i = 0; i < OF_A_WARP; ++i)
            if (COUNT % WARPS == 0 || warp + i * WARPS < COUNT)
                samples[(warp + i * WARPS) * WIDTH + place] = rows[i] < 0 || source < 0 ? fill : found[i];
    }
}

// Four neighbouring samples as they lie in shared memory.
template <typename Sample>
__device__ inline Packed<Sample> packed_at(const Sample* samples) {
    if constexpr (sizeof(Sample) == 1) return {{*reinterpret_cast<const unsigned*>(samples)}};
    else if constexpr (sizeof(Sample) == 2) {
        const uint2 pair = *reinterpret_cast<const uint2*>(samples);
        return {{pair.x, pair.y}};
    } else {
        const uint4 quad = *reinterpret_cast<const uint4*>(samples);
        return {{quad.x, quad.y, quad.z, quad.w}};
    }
}

// The same as what they are summed as: floats, whole numbers, or pairs of these.
template <typename Shape, int KIND, typename Sample, typename Value>
__device__ inline void enter(const Packed<Sample>& packed, Value (&x)[Shape::LANES]) {
    if constexpr (Shape::PAIRED) {
        x[0] = __byte_perm(packed.word[0], 0, 0x4140), x[1] = __byte_perm(packed.word[0], 0, 0x4342);
    } else if constexpr (!TINY<KIND, Sample>) {
        unpack<false>(packed, x);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned bits;
            if constexpr (sizeof(Sample) == 1) bits = __byte_perm(packed.word[0], 0, 0x4440 | j);
            else {
                const unsigned word = packed.word[j / 2] ^ (same<Sample, short> ? 0x80008000u : 0u);
                bits = j % 2 ? word >> 16 : word & 0xFFFFu;
            }
            if constexpr (same<Value, float>) x[j] = __uint_as_float(bits);
            else x[j] = bits;
        }
    }
}

__device__ inline void put_sums(unsigned* to, const float (&sum)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}
__device__ inline void put_sums(unsigned* to, const unsigned (&sum)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
}
__device__ inline void put_sums(unsigned* to, const unsigned (&sum)[2]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(sum[0], sum[1]);
}

// Left to itself the compiler makes four stores of one under a condition.
__device__ inline void store_16_bytes(void* to, uint4 vector) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z),
                 "r"(vector.w)
                 : "memory");
}

// Writes a warp's COUNT rows of results, which stand at `results` in the segments' runs, to row `y` and column `x` on.
template <typename Shape, int COUNT, typename Sample>
__device__ inline void store_results(const unsigned* results, Sample* plane, int y, int y_end, int x, int x_end,
                                     const Picture& picture) {
    constexpr int VECTOR = Shape::VECTOR, A_SEGMENT = Shape::SEGMENT / VECTOR, PIECES = Shape::WIDTH / VECTOR / 32;
    static_assert(Shape::WIDTH / VECTOR % 32 == 0 && 32 % A_SEGMENT == 0, "a warp stores a piece of one row at a time");
    static_assert(COUNT % 2 == 0, "two rows are stored at a time");
    constexpr int PIECE = 32 / A_SEGMENT * Shape::RUN;  // words
    const int lane = threadIdx.x % 32, left = x_end - x - lane * VECTOR;
    const long long row_samples = picture.out_row_samples;
    Sample* target = plane + y * row_samples + x + lane * VECTOR;
    results += lane / A_SEGMENT * Shape::RUN + lane % A_SEGMENT * 4;
    if (picture.aligned_out && (x_end - x) % VECTOR == 0 && y + COUNT <= y_end) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2, target += 2 * row_samples) {
            uint4 vector[2][PIECES];
#pragma unroll
            for (int j = 0; j < 2 * PIECES; ++j)
                vector[j / PIECES][j % PIECES] = *reinterpret_cast<const uint4*>(
                    results + (i + j / PIECES) * Shape::PITCH + j % PIECES * PIECE);
#pragma unroll
            for (int j = 0; j < 2 * PIECES; ++j)
                if (j % PIECES * 32 * VECTOR < left)
                    store_16_bytes(target + j / PIECES * row_samples + j % PIECES * 32 * VECTOR,
                                   vector[j / PIECES][j % PIECES]);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < COUNT && y + i < y_end; ++i, target += row_samples)
#pragma unroll 1
        for (int j = 0; j < PIECES; ++j) {
            const Sample* from = reinterpret_cast<const Sample*>(results + i * Shape::PITCH + j * PIECE);
#pragma unroll 1
            for (int k = 0; k < min(left - j * 32 * VECTOR, VECTOR); ++k) target[j * 32 * VECTOR + k] = from[k];
        }
}
