// The tile of a block of `fused`: unconverted samples, and sums, in shared memory. Part of smoothing.cu.
#pragma once

#include "async_copy.cuh"
#include "bands.cuh"
#include "shifted.cuh"
#include "cuda/windows.cuh"

__host__ __device__ constexpr int up_to(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

constexpr int MAX_RADIUS = 8;

// ALIGNED: rows begin at multiples of 16 bytes, in the input and in the output.
template <typename Sample, int CHANNELS, int RADIUS, int KIND, bool ALIGNED>
struct Fused {
    static constexpr bool FLOATS = same<Sample, float>;
    static constexpr int SIZE = sizeof(Sample);
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
    // Loads start at a sector (half a sector off, an H200's L2 reads 1.6 times as much), except for bytes, where that would
    // cost too many columns. Unaligned rows are loaded from the multiple of STEP samples (one or two vectors) below their
    // start, at most SKEW places more. Rows STEP apart have the same skew, so a thread's skews stay in registers. Unaligned
    // results are written by whole words, so SPARE more are computed.
    static constexpr int REACH = RADIUS * CHANNELS, SKEW = ALIGNED ? 0 : STEP - 1, SPARE = ALIGNED ? 0 : VECTOR / 4 - 1;
    static constexpr int HALO = up_to(REACH, !ALIGNED ? 8 : sizeof(Sample) == 1 ? VECTOR : SECTOR);
    static constexpr int OUTPUTS = ALIGNED ? (WIDTH - 2 * HALO) / SECTOR * SECTOR
                                           : (WIDTH - HALO - REACH - SKEW - SPARE) / VECTOR * VECTOR;

    // Sums of a row are in runs, one per segment. Runs start (nearly) 4 words apart modulo 32, so that the lanes of a warp,
    // which read quads of neighbouring segments, use all banks.
    static constexpr bool PAIRED = KIND == SQUARE && sizeof(Sample) == 1;  // two sums a word
    static constexpr int A_WORD = PAIRED ? 2 : 1, LANES = 4 / A_WORD;
    static constexpr int RUN = SEGMENT / A_WORD + 4, PLACES = WIDTH + 2 * HALO + 8;  // read beyond the end, not used
    static constexpr int PITCH = up_to(PLACES / SEGMENT * RUN + PLACES % SEGMENT / A_WORD, 4);
    // Whether samples beyond an edge are copied within the tile instead of fetched one by one: this pays if there are many
    // (Gaussian of f32 with reach 8: 168 -> 163 us on an H200), and otherwise costs registers.
    static constexpr bool COMPLETES = ALIGNED && FLOATS && RADIUS > 4;
    // Whether every other band is processed from its last row up, so that neighbours read the rows that both need at the
    // same time, from L2: Gaussian of f32 with reach 8, 152 -> 146 us on an H200; reach 6, 155 -> 145. Integers wait less for
    // memory, and have fewer registers to spare.
    static constexpr bool TURNS = FLOATS;
    // Columns between a thread's four. If they lie apart, skewed floats are loaded one by one without conflicts of banks.
    static constexpr int APART = FLOATS && !ALIGNED ? THREADS : 1;
    // Bytes of shared memory: a stage's samples (some are read behind them, but not used), and sums.
    static constexpr int SAMPLES = STEP * WIDTH * static_cast<int>(sizeof(Sample)) + (ALIGNED ? 0 : SECTOR_BYTES);
    static constexpr int SUMS = STEP * PITCH * 4;
};

// How many places farther right row i of a step lies if it is not aligned. A row beyond an edge lies as it would inside.
template <typename Shape>
struct Skews {
    unsigned start, stride;  // samples from a vector's start in memory to place 0 of row 0, and to that of the next row
    __device__ int operator()(int i) const { return Shape::SKEW ? (start + i * stride) % (Shape::SKEW + 1) : 0; }
    __device__ Skews before(int rows) const { return {start - rows * stride, stride}; }
};

// The places of a row that 16-byte copies may not fill (0 … left and right … right + count - left), and the indices from
// which their samples come (-1: beyond the edge).
struct Sources {
    int left, right, count;
    int source[1];
};

// Fills in `sources`. `x` is the input sample of the tile's first place; `needed` is the number of places needed.
template <typename Shape, int CHANNELS>
__device__ inline void find_sources(Sources* sources, int x, int needed, const Picture& picture) {
    if (threadIdx.x == 0) {
        // The vectors that straddle a row's ends differ from row to row.
        constexpr int UNSURE = Shape::SKEW > 0 ? 2 * Shape::VECTOR - 1 : 0;
        const int left = min(max(UNSURE - x, 0), needed);
        const int right = max(left, min(needed, picture.row_samples - x - UNSURE));
        sources->left = left, sources->right = right, sources->count = left + needed - right;
    }
    for (int i = threadIdx.x; i < needed; i += Shape::THREADS) {
        const int shifted = x + i + 1024 * CHANNELS;  // never negative
        const int from = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
        sources->source[i] = from < 0 ? -1 : from * CHANNELS + shifted % CHANNELS;
    }
}

// What 16-byte copies may not bring to a tile: nothing; samples that are constant or those of its other places; others too.
enum class Ends { NONE, WITHIN, ELSEWHERE };

template <typename Shape>
__device__ inline Ends ends_of(int x, const Picture& picture) {
    constexpr int BESIDE = Shape::SKEW > 0 ? Shape::VECTOR : 0;  // read beside rows beyond an edge
    if (x >= Shape::SKEW + BESIDE && x + Shape::WIDTH + BESIDE <= picture.row_samples) return Ends::NONE;
    return Shape::COMPLETES && picture.mode_x != WRAP ? Ends::WITHIN : Ends::ELSEWHERE;
}

template <typename Sample>
__device__ inline Sample fill_of(const Picture& picture) {
    if constexpr (same<Sample, float>) return __uint_as_float(picture.fill);
    else return static_cast<Sample>(picture.fill);
}

// Where a row is fetched from if `at` belongs at place 0.
template <typename Shape, typename Sample>
__device__ inline const Sample* start_of(const Sample* at) {
    if constexpr (Shape::SKEW == 0) return at;
    constexpr unsigned long long BYTES = (Shape::SKEW + 1) * Shape::SIZE;
    return reinterpret_cast<const Sample*>(reinterpret_cast<unsigned long long>(at) & -BYTES);
}

// Fetches COUNT rows, from `position` down or up, of the tile whose first place is input sample `x`. Ends that are WITHIN the
// tile are left to copy_ends.
template <typename Shape, int COUNT, typename Sample>
__device__ inline void fetch_rows(Sample* samples, const Skews<Shape>& skews, const Sample* plane, int position, bool up,
                                  int x, Ends ends, const Sources* sources, const Picture& picture) {
    constexpr int WIDTH = Shape::WIDTH, VECTOR = Shape::VECTOR, A_ROW = WIDTH / VECTOR, AT_ONCE = Shape::THREADS / A_ROW;
    const int row = threadIdx.x / A_ROW, at = threadIdx.x % A_ROW * VECTOR;
    const long long row_samples = picture.row_samples;
    const int way = up ? -1 : 1, last = position + way * (COUNT - 1);
    const bool inside = min(position, last) >= 0 && max(position, last) < picture.rows;
    const auto source_row = [&](int i) {
        return inside ? position + way * i : border_index(position + way * i, picture.rows, picture.mode_y);
    };
    if (inside && ends == Ends::NONE) {
        const Sample* from = plane + (position + way * row) * row_samples + x;
        const long long stride = way * AT_ONCE * row_samples;
#pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE, from += stride)
            if (COUNT % AT_ONCE == 0 || i + row < COUNT)
                copy_16_bytes(samples + (i + row) * WIDTH + at, start_of<Shape>(from) + at);
        return;
    }
    const Sample fill = fill_of<Sample>(picture);
    // A vector of a row beyond an edge may not be aligned where that row lies inside.
    const auto is_aligned = [&](int from, int begin) {
        return Shape::SKEW == 0 || from < 0 ||
               reinterpret_cast<unsigned long long>(plane + from * row_samples + begin) % 16 == 0;
    };
    const auto is_copied = [&](int from, int begin) {  // or else its samples come one by one
        const int beside = is_aligned(from, begin) ? 0 : VECTOR;
        return begin >= beside && begin + VECTOR + beside <= picture.row_samples;
    };
#pragma unroll 1
    for (int i = row; i < COUNT; i += AT_ONCE) {
        const int from = source_row(i), begin = x - skews(i) + at;
        const Sample* source = plane + from * row_samples + begin;
        Sample* to = samples + i * WIDTH + at;
        if (!is_copied(from, begin)) continue;
        if (from < 0)
            for (int j = 0; j < VECTOR; ++j) to[j] = fill;
        else if (is_aligned(from, begin)) copy_16_bytes(to, source);
        else *reinterpret_cast<uint4*>(to) = load_anywhere(source);
    }
    if (ends != Ends::ELSEWHERE) return;
    // The rest one by one, some rows per warp, all loads started before the first is waited for.
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
        for (int i = 0; i < OF_A_WARP; ++i) {
            const int skew = skews(warp + i * WARPS), to = place + skew;
            if (Shape::SKEW > 0 && is_copied(rows[i], x - skew + to / VECTOR * VECTOR)) continue;
            if (COUNT % WARPS == 0 || warp + i * WARPS < COUNT)
                samples[(warp + i * WARPS) * WIDTH + to] = rows[i] < 0 || source < 0 ? fill : found[i];
        }
    }
}

// Completes COUNT rows of a tile, once all threads have waited for them, with samples from its other places.
template <typename Shape, int COUNT, typename Sample>
__device__ inline void copy_ends(Sample* samples, int x, const Sources* sources, const Picture& picture) {
    constexpr int WARPS = Shape::THREADS / 32;
    const int warp = threadIdx.x / 32, left = sources->left, beyond = sources->right - left;
    const Sample fill = fill_of<Sample>(picture);
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < sources->count; k += 32) {
        const int place = k < left ? k : k + beyond, source = sources->source[place];
#pragma unroll
        for (int i = 0; i < COUNT; i += WARPS) {
            Sample* row = samples + (i + warp) * Shape::WIDTH;
            if (COUNT % WARPS == 0 || i + warp < COUNT) row[place] = source < 0 ? fill : row[source - x];
        }
    }
    __syncthreads();
}

// Four neighbouring samples as in shared memory.
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

// The same, `skew` places farther right, which may not be a word boundary.
template <typename Sample>
__device__ inline Packed<Sample> packed_at(const Sample* samples, int skew) {
    constexpr int WORDS = sizeof(Sample);
    const Packed<Sample> low = packed_at(samples + (skew & ~3)), high = packed_at(samples + (skew & ~3) + 4);
    unsigned word[2 * WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = low.word[i], word[WORDS + i] = high.word[i];
    if (WORDS >= 2)
#pragma unroll
        for (int i = 0; i + WORDS / 2 < 2 * WORDS; ++i) word[i] = skew & 2 ? word[i + WORDS / 2] : word[i];
    if (WORDS == 4)
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = skew & 1 ? word[i + 1] : word[i];
    Packed<Sample> packed;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        packed.word[i] = WORDS == 4 ? word[i] : __funnelshift_r(word[i], word[i + 1], skew * 8 * WORDS % 32);
    return packed;
}

template <typename Shape, typename Sample>
__device__ inline Packed<Sample> packed_row(const Sample* samples, int skew) {
    if constexpr (Shape::SKEW == 0) return packed_at(samples);
    else if constexpr (Shape::APART == 1) return packed_at(samples, skew);
    else {
        Packed<Sample> packed;
        samples += skew;
#pragma unroll
        for (int j = 0; j < 4; ++j) packed.word[j] = __float_as_uint(samples[j * Shape::APART]);
        return packed;
    }
}

// Converts them to the type of their sums: floats, integers, or pairs of integers.
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

template <typename Shape>
__device__ inline void put_sums(unsigned* to, const float (&sum)[4]) {
    if constexpr (Shape::APART == 1) *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j * Shape::APART / Shape::SEGMENT * Shape::RUN] = __float_as_uint(sum[j]);
    }
}
template <typename Shape>
__device__ inline void put_sums(unsigned* to, const unsigned (&sum)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
}
template <typename Shape>
__device__ inline void put_sums(unsigned* to, const unsigned (&sum)[2]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(sum[0], sum[1]);
}

// Bytes between the start of a word of memory and `target`.
template <typename Sample>
__device__ inline int shift_of(const Sample* target) {
    return sizeof(Sample) < 4 ? static_cast<unsigned>(reinterpret_cast<unsigned long long>(target)) % 4 : 0;
}

// Moves a segment's results up by as many bytes. The lane before has those in front of them.
template <typename Sample, int COUNT>
__device__ inline void shift_results(Packed<Sample> (&done)[COUNT], int bytes) {
    constexpr int SIZE = sizeof(Sample);
    const unsigned before = __shfl_up_sync(0xFFFFFFFFu, done[COUNT - 1].word[SIZE - 1], 1);
#pragma unroll
    for (int i = COUNT * SIZE - 1; i >= 0; --i) {
        const unsigned low = i > 0 ? done[max(i - 1, 0) / SIZE].word[max(i - 1, 0) % SIZE] : before;
        done[i / SIZE].word[i % SIZE] = __funnelshift_l(low, done[i / SIZE].word[i % SIZE], 8 * bytes);
    }
}

// Writes a warp's COUNT rows of results (or `left`, if fewer), which are at `results` in the segments' runs, from row `y` down
// or up, and from column `x` on. Unaligned integers have been moved up by their bytes past a word of memory.
template <typename Shape, int COUNT, typename Sample>
__device__ inline void store_results(const unsigned* results, Sample* plane, int y, int left, bool up, int x, int x_end,
                                     const Picture& picture) {
    constexpr int VECTOR = Shape::VECTOR, A_SEGMENT = Shape::SEGMENT / VECTOR, PIECES = Shape::WIDTH / VECTOR / 32;
    static_assert(Shape::WIDTH / VECTOR % 32 == 0 && 32 % A_SEGMENT == 0, "a warp stores a piece of one row at a time");
    static_assert(COUNT % 2 == 0, "two rows are stored at a time");
    const long long row_samples = picture.out_row_samples, stride = up ? -row_samples : row_samples;
    Sample* target = plane + y * row_samples + x;
    if constexpr (Shape::SKEW > 0) {
        // Whole lines of memory, a word a lane: the words that begin among the tile's results, and single samples at the ends
        // of the image's row.
        constexpr int SIZE = Shape::SIZE, LINES = (Shape::OUTPUTS * SIZE + 126) / 128 + 1;
        constexpr int A_RUN = Shape::SEGMENT * SIZE / 4, LINE = 32 / A_RUN * Shape::RUN;  // words, and to the next line's
        constexpr int FAR = (Shape::OUTPUTS + Shape::SPARE + 1) * SIZE;  // bytes: the row's end matters if it is nearer
        static_assert(32 % A_RUN == 0, "lines are whole runs apart");
        const int lane = threadIdx.x % 32, in_row = min(picture.out_row_samples - x, FAR / SIZE) * SIZE;
        const int count = (x_end - x) * SIZE;
        const bool ends = SIZE < 4 && (x == 0 || in_row < FAR);
#pragma unroll 1
        for (int i = 0; i < min(COUNT, left); ++i, target += stride, results += Shape::PITCH) {
            const int past = static_cast<int>(reinterpret_cast<unsigned long long>(target) % 128), skip = shift_of(target);
            const int at = lane - past / 4, whole = (in_row + skip) / 4;
            const int words = SIZE == 4 ? x_end - x : min((count + skip + 3) / 4, whole);
            const unsigned place = at + 32;  // never negative
            const unsigned* result = results + (place / A_RUN * Shape::RUN + place % A_RUN) - LINE;
            unsigned* line = reinterpret_cast<unsigned*>(reinterpret_cast<unsigned char*>(target) - past) + lane;
#pragma unroll
            for (int j = 0; j < LINES; ++j)
                if ((j > 0 || at >= (skip > 0)) && at + 32 * j < words) line[32 * j] = result[j * LINE];
            if (!ends) continue;
            const auto put = [&](int byte) {
                const unsigned* word = results + (byte + skip) / 4 / A_RUN * Shape::RUN + (byte + skip) / 4 % A_RUN;
                target[byte / SIZE] = reinterpret_cast<const Sample*>(word)[(byte + skip) % 4 / SIZE];
            };
            const int byte = lane * SIZE, last = 4 * whole - skip;
            if (x == 0 && skip > 0 && byte < min(4 - skip, in_row)) put(byte);
            if (last >= 0 && last < count && last + byte < in_row) put(last + byte);
        }
        return;
    }
    constexpr int PIECE = 32 / A_SEGMENT * Shape::RUN;  // words
    const int lane = threadIdx.x % 32, samples = x_end - x - lane * VECTOR;
    target += lane * VECTOR;
    results += lane / A_SEGMENT * Shape::RUN + lane % A_SEGMENT * 4;
    if (left >= COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2, target += 2 * stride) {
            uint4 vector[2][PIECES];
#pragma unroll
            for (int j = 0; j < 2 * PIECES; ++j)
                vector[j / PIECES][j % PIECES] = *reinterpret_cast<const uint4*>(
                    results + (i + j / PIECES) * Shape::PITCH + j % PIECES * PIECE);
#pragma unroll
            for (int j = 0; j < 2 * PIECES; ++j)
                if (j % PIECES * 32 * VECTOR < samples)
                    store_16_bytes(target + j / PIECES * stride + j % PIECES * 32 * VECTOR,
                                   vector[j / PIECES][j % PIECES]);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(COUNT, left); ++i, target += stride)
#pragma unroll 1
        for (int j = 0; j < PIECES; ++j) {
            const Sample* from = reinterpret_cast<const Sample*>(results + i * Shape::PITCH + j * PIECE);
#pragma unroll 1
            for (int k = 0; k < min(samples - j * 32 * VECTOR, VECTOR); ++k) target[j * 32 * VECTOR + k] = from[k];
        }
}
