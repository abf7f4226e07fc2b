// Box and Gaussian smoothing. The arithmetic is defined to the bit in kernels/smoothing/__init__.py.
//
// Arrays are C-contiguous. A pass filters one axis of an array seen as [outer, length, inner] and writes
// [outer, out_length, inner]; passes run in ascending order of axes. Between the passes of a box over whole numbers
// stand the exact sums (32 bits where they fit, else 64), between those of a Gaussian the float sums, unrounded.
// Border modes are numbered in borders.cuh; `fill` is what a pass sees beyond the edge in mode CONSTANT.
//
// Floors of a two-dimensional filter of N samples of b bytes, t taps an axis, on a device with bandwidth B, rate F:
//   bytes       2 N b / B           each sample is read once and written once
//   operations  box N (2 log2 t … 4) / F;  Gaussian N (2 t) / F: an addition and a multiply-add a pair of taps, twice
//
// Kernels, naive to fast:
//   box_gather, gauss_gather        one thread a result, every tap from global memory
//   box_direct                      the same over all axes at once (whole numbers)
//   box_separable, gauss_separable  one axis a pass, taps from a tile in shared memory
// Source of the doubling sums: Blelloch, "Prefix sums and their applications" (1990), applied to windows of any length.

#include "borders.cuh"
#include "packed.cuh"
#include "samples.cuh"

constexpr int MAX_HALF = 128;  // weights at distances 0 … 127
constexpr int THREADS = 256;

struct Axis {
    long long outer, length, inner, out_length;
    int before, taps, mode, columns;  // columns: samples of `inner` in a tile of a separable pass
};

template <typename Work>
struct Weights {
    Work half[MAX_HALF];
};

// Input position of the first tap of output 0.
__device__ inline int first_tap(const Axis& axis) { return axis.mode == VALID ? 0 : -axis.before; }

// One sample of one line of an axis: `line` points to its first sample.
template <typename Sum, typename In>
__device__ inline Sum tap(const In* line, long long at, const Axis& axis, Sum fill) {
    const long long from = border_index(at, axis.length, axis.mode);
    if constexpr (same<In, Sum>) return from < 0 ? fill : line[from * axis.inner];
    else return from < 0 ? fill : to_sum<Sum>(line[from * axis.inner]);
}

template <typename In, typename Work>
__device__ inline Work weighed_tap(const In* line, long long at, const Axis& axis, Work fill) {
    const long long from = border_index(at, axis.length, axis.mode);
    return from < 0 ? fill : static_cast<Work>(line[from * axis.inner]);
}

// W(taps) at `first` by the contract's doubling tree, walked depth first: two halves merge as carries of a counter do.
template <typename Sum, typename In>
__device__ inline Sum window_sum(const In* line, long long first, const Axis& axis, Sum fill) {
    Sum pending[8];
    const int depth = 31 - __clz(axis.taps);
    for (int leaf = 0;; ++leaf) {
        long long start = first;
        for (int level = 0; level < depth; ++level)
            if (leaf >> level & 1) start += axis.taps >> (depth - level);
        Sum sum = tap<Sum>(line, start, axis, fill);
        int level = 0;
        for (; level < depth && (leaf >> level & 1); ++level) {
            const int half = axis.taps >> (depth - level), whole = axis.taps >> (depth - level - 1);
            start -= half;
            sum = pending[level] + sum;
            if (whole & 1) sum = sum + tap<Sum>(line, start + 2 * half, axis, fill);
        }
        if (level == depth) return sum;
        pending[level] = sum;
    }
}

// box_gather: the definition, one axis a pass. Every tap is a load, and the same samples are loaded `taps` times.
template <typename In, typename Sum, typename Out>
__global__ void __launch_bounds__(THREADS)
box_gather(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Sum fill, Sum divisor) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < total; i += gridDim.x * (long long)THREADS) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.out_length * axis.length * axis.inner + column;
        const Sum sum = window_sum(line, row % axis.out_length + first_tap(axis), axis, fill);
        if constexpr (same<Sum, Out> && !same<Sum, float> && !same<Sum, double>) out[i] = sum;
        else out[i] = to_mean<Out>(sum, divisor);
    }
}

// gauss_gather: the same for weights.
template <typename In, typename Work, typename Out>
__global__ void __launch_bounds__(THREADS)
gauss_gather(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Work fill, Weights<Work> weights) {
    const long long total = axis.outer * axis.out_length * axis.inner;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < total; i += gridDim.x * (long long)THREADS) {
        const long long column = i % axis.inner, row = i / axis.inner;
        const In* line = in + row / axis.out_length * axis.length * axis.inner + column;
        const long long centre = row % axis.out_length + first_tap(axis) + axis.before;
        Work sum = weights.half[0] * weighed_tap(line, centre, axis, fill);
        for (int k = 1; k <= axis.before; ++k) {
            const Work pair = weighed_tap(line, centre - k, axis, fill) + weighed_tap(line, centre + k, axis, fill);
            sum = fma_rn(weights.half[k], pair, sum);
        }
        out[i] = to_sample<Out>(sum);
    }
}

// An array seen as [between, length 0, between, length 1, between, length 2, inner], up to three axes filtered.
struct Axes {
    Axis axis[3];  // `inner` is the stride of that axis in the input
    long long between[3];
    long long inner, total;
};

// box_direct: the whole window at once. Saves the intermediate arrays of box_gather, pays with the product of the sizes.
template <typename Sample>
__global__ void __launch_bounds__(THREADS)
box_direct(const Sample* __restrict__ in, Sample* __restrict__ out, Axes axes, int fill, unsigned long long divisor) {
    typedef unsigned long long Sum;
    for (long long i = blockIdx.x * (long long)THREADS + threadIdx.x; i < axes.total;
         i += gridDim.x * (long long)THREADS) {
        long long rest = i / axes.inner, base = i % axes.inner, first[3];
        for (int d = 2; d >= 0; --d) {
            const Axis& axis = axes.axis[d];
            first[d] = rest % axis.out_length + first_tap(axis);
            rest /= axis.out_length;
            base += rest % axes.between[d] * axis.length * axis.inner;
            rest /= axes.between[d];
        }
        Sum sum = 0;
        for (int a = 0; a < axes.axis[0].taps; ++a)
            for (int b = 0; b < axes.axis[1].taps; ++b)
                for (int c = 0; c < axes.axis[2].taps; ++c) {
                    const long long p = border_index(first[0] + a, axes.axis[0].length, axes.axis[0].mode);
                    const long long q = border_index(first[1] + b, axes.axis[1].length, axes.axis[1].mode);
                    const long long r = border_index(first[2] + c, axes.axis[2].length, axes.axis[2].mode);
                    const long long from = p * axes.axis[0].inner + q * axes.axis[1].inner + r * axes.axis[2].inner;
                    sum += to_sum<Sum>(p < 0 || q < 0 || r < 0 ? static_cast<Sample>(fill) : in[base + from]);
                }
        out[i] = to_mean<Sample>(sum, divisor);
    }
}

// A tile of a separable pass: TILE values in shared memory, [positions along the axis, columns of `inner`].
template <typename Sum>
constexpr int PER_THREAD = 64 / sizeof(Sum);
template <typename Sum>
constexpr int TILE = THREADS * PER_THREAD<Sum>;

struct Tile {
    long long input, output, position;  // offsets of its first column; position of its first output along the axis
    int columns;                        // how many of its columns exist
};

__device__ inline Tile tile_at(long long index, const Axis& axis, int outputs) {
    const long long chunks = (axis.inner + axis.columns - 1) / axis.columns;
    const long long segments = (axis.out_length + outputs - 1) / outputs;
    const long long chunk = index % chunks, outer = index / chunks / segments;
    const long long column = chunk * axis.columns, position = index / chunks % segments * outputs;
    return {outer * axis.length * axis.inner + column, (outer * axis.out_length + position) * axis.inner + column,
            position, static_cast<int>(min(static_cast<long long>(axis.columns), axis.inner - column))};
}

// box_separable: windows by doubling in a tile, as the contract has it: log2(taps) steps in place of `taps` loads.
// A thread keeps its window sums in registers; shared memory passes them to the threads `m` positions before.
template <typename In, typename Sum, typename Out>
__global__ void __launch_bounds__(THREADS)
box_separable(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Sum fill, Sum divisor, long long tiles) {
    constexpr int PER = PER_THREAD<Sum>, SIZE = TILE<Sum>;
    __shared__ Sum samples[SIZE], windows[SIZE];
    const int outputs = SIZE / axis.columns - axis.taps + 1;
    for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(index, axis, outputs);
        Sum window[PER];
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            const long long position = tile.position + row + first_tap(axis);
            const bool needed = column < tile.columns && position < axis.out_length + axis.taps - 1 + first_tap(axis);
            window[k] = needed ? tap<Sum>(in + tile.input + column, position, axis, fill) : Sum(0);
            samples[at] = windows[at] = window[k];
        }
        for (int bit = 30 - __clz(axis.taps); bit >= 0; --bit) {
            const int reach = (axis.taps >> (bit + 1)) * axis.columns;
            __syncthreads();
            for (int k = 0; k < PER; ++k) {
                const int at = threadIdx.x + k * THREADS;
                if (at + reach < SIZE) window[k] = window[k] + windows[at + reach];
                if ((axis.taps >> bit & 1) && at + 2 * reach < SIZE) window[k] = window[k] + samples[at + 2 * reach];
            }
            __syncthreads();
            for (int k = 0; k < PER; ++k) windows[threadIdx.x + k * THREADS] = window[k];
        }
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            if (row >= outputs || tile.position + row >= axis.out_length || column >= tile.columns) continue;
            const long long to = tile.output + row * axis.inner + column;
            if constexpr (same<Sum, Out> && !same<Sum, float> && !same<Sum, double>) out[to] = window[k];
            else out[to] = to_mean<Out>(window[k], divisor);
        }
    }
}

// gauss_separable: each sample is loaded once a tile; the taps come from shared memory.
template <typename In, typename Work, typename Out>
__global__ void __launch_bounds__(THREADS)
gauss_separable(const In* __restrict__ in, Out* __restrict__ out, Axis axis, Work fill, Weights<Work> weights,
                long long tiles) {
    constexpr int PER = PER_THREAD<Work>, SIZE = TILE<Work>;
    __shared__ Work samples[SIZE];
    const int outputs = SIZE / axis.columns - axis.taps + 1;
    for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(index, axis, outputs);
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            const long long position = tile.position + row + first_tap(axis);
            const bool needed = column < tile.columns && position < axis.out_length + axis.taps - 1 + first_tap(axis);
            samples[at] = needed ? weighed_tap(in + tile.input + column, position, axis, fill) : Work(0);
        }
        __syncthreads();
        for (int k = 0; k < PER; ++k) {
            const int at = threadIdx.x + k * THREADS, row = at / axis.columns, column = at % axis.columns;
            if (row >= outputs || tile.position + row >= axis.out_length || column >= tile.columns) continue;
            const int centre = at + axis.before * axis.columns;
            Work sum = weights.half[0] * samples[centre];
            for (int j = 1, reach = axis.columns; j <= axis.before; ++j, reach += axis.columns)
                sum = fma_rn(weights.half[j], samples[centre - reach] + samples[centre + reach], sum);
            out[tile.output + row * axis.inner + column] = to_sample<Out>(sum);
        }
    }
}

// fused: both axes of [planes, rows, columns, channels] in one kernel, short windows (reach up to RADIUS on each side).
// A block walks down a band of rows, ROWS at a time. Each thread filters four neighbouring columns from registers, where
// the rows of the window stay; the sums go through shared memory to threads that each filter 32 samples of one row, again
// from registers. So each sample is read once (but for halos, from L2) and written once, and nothing else leaves the chip.
constexpr int ROWS = 8;
// Blocks write whole cache lines (u8: half lines): written in parts by two blocks, a copy lost 15 % (H200).
template <typename Sample>
constexpr int ALIGNED_BYTES = sizeof(Sample) == 1 ? 64 : 128;
constexpr int SEGMENT = 32;  // samples of a row that a thread filters along it
constexpr int MAX_RADIUS = 8;
enum FilterKind { GAUSS, BOX };

struct Picture {
    int planes, rows, out_rows, band_rows, bands, tiles, columns, row_samples, out_row_samples;
    int centre_y, centre_x;  // input position, in samples, of output 0's centre ("valid" moves it)
    int mode_y, mode_x;
    int aligned_in, aligned_out;  // whether whole vectors can be loaded and stored
    unsigned fill;                // the sample beyond the edge in mode CONSTANT
};

// Gauss: weight at distance 0 … RADIUS; 0 beyond the reach adds nothing to whole numbers, but 0 times infinity is NaN: for
// floats RADIUS is the reach. Box over whole numbers: 1 or 0 for each of the 2 RADIUS + 1 places.
struct Filter {
    float y[2 * MAX_RADIUS + 1], x[2 * MAX_RADIUS + 1];
    float scale, bias;  // box: see rounded_mean
    int taps_y, taps_x;
};

// W(TAPS) at x[at] by the contract's doubling; the compiler shares the parts among neighbours.
template <int TAPS, int STRIDE, int SIZE>
__device__ inline float doubled(const float (&x)[SIZE], int at) {
    if constexpr (TAPS == 1) {
        return x[at];
    } else {
        constexpr int HALF = TAPS / 2;
        float sum = doubled<HALF, STRIDE>(x, at) + doubled<HALF, STRIDE>(x, at + HALF * STRIDE);
        if constexpr (TAPS % 2 == 1) sum = sum + x[at + 2 * HALF * STRIDE];
        return sum;
    }
}

// One filtered sample from x[centre - RADIUS * STRIDE] … x[centre + RADIUS * STRIDE].
template <int KIND, int RADIUS, int STRIDE, int SIZE>
__device__ inline float filtered(const float (&x)[SIZE], int centre, const float* weights, float bias) {
    if constexpr (KIND == GAUSS) {
        float sum = weights[0] * x[centre];
#pragma unroll
        for (int k = 1; k <= RADIUS; ++k)
            sum = fma_rn(weights[k], x[centre - k * STRIDE] + x[centre + k * STRIDE], sum);
        return sum;
    } else {
        float sum = bias;
#pragma unroll
        for (int k = -RADIUS; k <= RADIUS; ++k) sum = fma_rn(weights[k + RADIUS], x[centre + k * STRIDE], sum);
        return sum;
    }
}

// Calls body(std::integral_constant-like) for the number of taps that a float box has.
template <int TAPS>
struct Taps {
    static constexpr int value = TAPS;
};

template <int MOST, typename Body>
__device__ inline void for_taps(int taps, Body body) {
    if constexpr (MOST > 1) {
        if (taps != MOST) return for_taps<MOST - 1>(taps, body);
    }
    body(Taps<MOST>());
}

// The bits of the finished sample in the low end of a word. Adding 2^23 (for signed numbers 1.5 * 2^23) rounds to a whole
// number, ties to even. A box's mean must go up at a tie: sums of an even number of samples carry a bias of 1/2, which
// moves ties up and nothing else across; for up to 81 samples of 16 bits the error of scale, at most 65535 * 2^-24 of a
// unit, is less than the distance, 1/162, of every other quotient from a half.
template <int KIND, typename Sample>
__device__ inline unsigned finished(float sum, float scale) {
    if constexpr (same<Sample, float>) return __float_as_uint(KIND == BOX ? sum * scale : sum);
    else if constexpr (KIND == BOX) return __float_as_uint(fma_rn(sum, scale, 8388608.0f));
    else return __float_as_uint(sum + (same<Sample, short> ? 12582912.0f : 8388608.0f));
}

struct Place {
    int tile, band;
    long long plane;
};

// Which part of the images a block filters. Tiles at the left and right edge take longest, so all of those come first: a
// device that is done with them last would stand idle but for a few blocks.
__device__ inline Place place_of(unsigned block, const Picture& picture) {
    const unsigned edges = min(picture.tiles, 2), outer = edges * picture.bands * picture.planes;
    const bool at_edge = block < outer;
    const unsigned across = at_edge ? edges : picture.tiles - edges, rest = at_edge ? block : block - outer;
    const int tile = static_cast<int>(rest % across) + (at_edge ? 0 : 1), row = rest / across;
    return {at_edge && tile == 1 ? picture.tiles - 1 : tile, row % picture.bands, row / picture.bands};
}

// Where a thread's four columns come from.
struct Columns {
    int first, source[4];
    bool whole;  // one vector load from `first` brings them all
};

template <int CHANNELS>
__device__ inline Columns columns_at(int first, const Picture& picture) {
    Columns columns;
    columns.first = first;
    columns.whole = picture.aligned_in && first >= 0 && first + 4 <= picture.row_samples;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int sample = first + j, shifted = sample + 1024 * CHANNELS;  // never negative
        const int from = border_index(shifted / CHANNELS - 1024, picture.columns, picture.mode_x);
        columns.source[j] = from < 0 ? -1 : from * CHANNELS + shifted % CHANNELS;
    }
    return columns;
}

// The thread's columns in COUNT rows from `position` on.
template <int COUNT, typename Sample>
__device__ inline void load_rows(Packed<Sample>* rows, const Sample* plane, int position, const Columns& columns,
                                 const Picture& picture) {
    if (columns.whole && position >= 0 && position + COUNT <= picture.rows) {
        const Sample* from = plane + position * (long long)picture.row_samples + columns.first;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) rows[i] = load_packed(from + i * (long long)picture.row_samples);
        return;
    }
    // At the edges every load is made, wherever it must not count from sample 0, so that none waits for another.
    Sample samples[COUNT][4];
    int row[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        row[i] = near_border_index(position + i, picture.rows, picture.mode_y);
        const Sample* line = plane + max(row[i], 0) * (long long)picture.row_samples;
#pragma unroll
        for (int j = 0; j < 4; ++j) samples[i][j] = __ldg(line + max(columns.source[j], 0));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            put(rows[i], j, row[i] < 0 || columns.source[j] < 0 ? picture.fill : bits_of(samples[i][j]));
}

template <typename Sample>
__device__ inline void prefetch_rows(const Sample* plane, int position, const Columns& columns, const Picture& picture) {
    if (position < 0 || position + ROWS > picture.rows || !columns.whole) return;
    const Sample* from = plane + position * (long long)picture.row_samples + columns.first;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i * (long long)picture.row_samples));
}

// Writes the warp's 128 samples of each of ROWS rows, which lie at `staged` a row of PITCH words each, to row `y` and
// column `x` of the output on: each lane writes vectors one below the other.
template <int PITCH, typename Sample>
__device__ inline void store_rows(const float* staged, Sample* plane, int y, int y_end, int x, int x_end,
                                  const Picture& picture) {
    constexpr int VECTOR = 16 / sizeof(Sample), A_ROW = 128 / VECTOR, STRIDE = 32 / A_ROW;
    const int lane = threadIdx.x % 32, first_row = lane / A_ROW, column = lane % A_ROW * VECTOR;
    const long long row_samples = picture.out_row_samples;
    Sample* target = plane + (y + first_row) * row_samples + x + column;
    staged += first_row * PITCH;
    if (picture.aligned_out && x + column + VECTOR <= x_end && y + ROWS <= y_end) {
#pragma unroll
        for (int i = 0; i < ROWS; i += STRIDE)
            *reinterpret_cast<uint4*>(target + i * row_samples) =
                reinterpret_cast<const uint4*>(staged + i * PITCH)[lane % A_ROW];
        return;
    }
    const int samples = min(VECTOR, x_end - x - column);
#pragma unroll 1
    for (int i = 0; i < ROWS && y + first_row + i < y_end; i += STRIDE)
#pragma unroll 1
        for (int j = 0; j < samples; ++j)
            target[i * row_samples + j] = reinterpret_cast<const Sample*>(staged + i * PITCH)[column + j];
}

// Wide blocks waste little on halos; floats of a long window need more registers a thread than those leave.
template <typename Sample, int RADIUS>
constexpr int FUSED_THREADS = same<Sample, float> && RADIUS > 4 ? 128 : 256;

template <typename Sample, int CHANNELS, int RADIUS, int KIND>
__global__ void __launch_bounds__(FUSED_THREADS<Sample, RADIUS>, FUSED_THREADS<Sample, RADIUS> == 128 ? 3 : 2)
fused(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Filter filter) {
    constexpr int WIDTH = 4 * FUSED_THREADS<Sample, RADIUS>;  // samples of a row that a block loads
    constexpr int PITCH = WIDTH + 68;  // room to read beyond the end; 4 modulo 32: eight rows lie in different banks
    constexpr int HALO = (RADIUS * CHANNELS + 3) / 4 * 4, ALIGN = ALIGNED_BYTES<Sample> / sizeof(Sample);
    constexpr int OUTPUTS = (WIDTH - 2 * HALO) / ALIGN * ALIGN;
    constexpr bool FLOAT_BOX = KIND == BOX && same<Sample, float>;
    extern __shared__ __align__(16) float shared[];
    float(*both_sums)[ROWS][PITCH] = reinterpret_cast<float(*)[ROWS][PITCH]>(shared);  // two of them
    const Place place = place_of(blockIdx.x, picture);
    const Sample* in_plane = in + place.plane * picture.rows * picture.row_samples;
    Sample* out_plane = out + place.plane * picture.out_rows * picture.out_row_samples;
    const int x = place.tile * OUTPUTS, x_end = min(x + OUTPUTS, picture.out_row_samples);
    const int y_begin = place.band * picture.band_rows, y_end = min(y_begin + picture.band_rows, picture.out_rows);
    const Columns columns = columns_at<CHANNELS>(x - HALO + picture.centre_x + 4 * static_cast<int>(threadIdx.x), picture);

    float window[2 * RADIUS + ROWS][4];
    // The rows of the next step are on their way while this one is computed: in registers, or where those do not suffice
    // at least to L2.
    constexpr bool AHEAD = RADIUS == 1, KEEP_PACKED = RADIUS > 4;
    Packed<Sample> next[ROWS], past[2 * RADIUS];
    const int first = y_begin + picture.centre_y - RADIUS;
    load_rows<2 * RADIUS>(past, in_plane, first, columns, picture);
#pragma unroll
    for (int i = 0; i < 2 * RADIUS; ++i) unpack<KIND == BOX>(past[i], window[i]);
    if (AHEAD) load_rows<ROWS>(next, in_plane, first + 2 * RADIUS, columns, picture);

    const int lane = threadIdx.x % 32, row = lane % ROWS, warp_x = threadIdx.x / 32 * 128;
    const int segment = warp_x + lane / ROWS * SEGMENT;
#pragma unroll 1
    for (int y = y_begin, step = 0; y < y_end; y += ROWS, ++step) {
        // Two buffers, so that one barrier a step is enough: who writes here has passed the barrier after which the
        // other buffer was read, and all had read this one before that.
        float(*sums)[PITCH] = both_sums[step & 1];
const int entering = y - y_begin + first + 2 * RADIUS;
        if (!AHEAD) load_rows<ROWS>(next, in_plane, entering, columns, picture);
#pragma unroll
        for (int i = 0; KEEP_PACKED && i < 2 * RADIUS; ++i) {
            unpack<KIND == BOX>(past[i], window[i]);
            past[i] = i + ROWS < 2 * RADIUS ? past[i + ROWS] : next[i + ROWS - 2 * RADIUS];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) unpack<KIND == BOX>(next[i], window[2 * RADIUS + i]);
        if (y + ROWS < y_end) {
            if (AHEAD) load_rows<ROWS>(next, in_plane, entering + ROWS, columns, picture);
            else prefetch_rows(in_plane, entering + ROWS, columns, picture);
        }
        const auto filter_columns = [&](auto taps) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                float sum[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float column[2 * RADIUS + 1];
#pragma unroll
                    for (int k = 0; k <= 2 * RADIUS; ++k) column[k] = window[i + k][j];
                    if constexpr (FLOAT_BOX) sum[j] = doubled<taps.value, 1>(column, RADIUS - taps.value / 2);
                    else sum[j] = filtered<KIND, RADIUS, 1>(column, RADIUS, filter.y, 0.0f);
                }
                *reinterpret_cast<float4*>(&sums[i][4 * threadIdx.x]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        };
        if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_y, filter_columns);
        else filter_columns(Taps<1>());
#pragma unroll
        for (int i = 0; !KEEP_PACKED && i < 2 * RADIUS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) window[i][j] = window[i + ROWS][j];
        __syncthreads();

        constexpr int SEEN = SEGMENT + 2 * HALO;
        float seen[SEEN];
        Packed<Sample> done[SEGMENT / 4];
        const auto see = [&](int i) {
            const float4 quad = *reinterpret_cast<const float4*>(&sums[row][segment + i]);
            seen[i] = quad.x, seen[i + 1] = quad.y, seen[i + 2] = quad.z, seen[i + 3] = quad.w;
        };
#pragma unroll
        for (int i = 0; i < 2 * HALO; i += 4) see(i);
        const auto filter_row = [&](auto taps) {
#pragma unroll
            for (int i = 0; i < SEGMENT; i += 4) {
                unsigned bits[4];
                see(2 * HALO + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = HALO + i + j;
                    float sum;
                    if constexpr (FLOAT_BOX) sum = doubled<taps.value, CHANNELS>(seen, at - taps.value / 2 * CHANNELS);
                    else
                        sum = filtered<KIND, RADIUS, CHANNELS>(seen, at, filter.x, filter.bias);
                    bits[j] = finished<KIND, Sample>(sum, filter.scale);
                }
                done[i / 4] = pack<Sample>(bits);
                if constexpr (KIND == BOX && same<Sample, short>) {
                    done[i / 4].word[0] ^= 0x80008000u;
                    done[i / 4].word[1] ^= 0x80008000u;
                }
            }
        };
        if constexpr (FLOAT_BOX) for_taps<2 * RADIUS + 1>(filter.taps_x, filter_row);
        else filter_row(Taps<1>());

        // The other buffer is free from the barrier on. The warp's own zone of it, which only it will write, takes the
        // results, to be stored a row at a time.
        float(*results)[PITCH] = both_sums[~step & 1];
        unsigned* staged = reinterpret_cast<unsigned*>(&results[row][warp_x]) + lane / ROWS * SEGMENT * sizeof(Sample) / 4;
#pragma unroll
        for (int i = 0; i < SEGMENT / 4 * static_cast<int>(sizeof(Sample)); ++i)
            staged[i] = done[i / sizeof(Sample)].word[i % sizeof(Sample)];
        __syncwarp();
        store_rows<PITCH>(&results[0][warp_x], out_plane, y, y_end, x + warp_x, x_end, picture);
        __syncwarp();
    }
}

// box_running: boxes of any size over whole numbers, in time that does not depend on the size. A block walks down a band
// of rows; each thread keeps the sums down its four columns, adding the row that enters the window and subtracting the one
// that leaves (again from L2). Along a row each warp then makes prefix sums, and a window is the difference of two.
constexpr int RUNNING_THREADS = 256;  // a warp for each of ROWS rows
constexpr int CHUNK = 32;             // samples of a row that a lane sums

struct Mean {
    int before_y, taps_y, before_x, taps_x;
    unsigned half, multiplier, shift;  // (sum + half) * multiplier >> 32 + shift is the mean, exactly (checked in fused.py)
    int outputs;                       // samples of a row that a block writes
};

// Four samples added to their columns' sums, or with SIGN -1 subtracted.
template <int SIGN, typename Sample>
__device__ inline void accumulate(unsigned (&sum)[4], const Packed<Sample>& packed) {
    if constexpr (sizeof(Sample) == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += SIGN * __byte_perm(packed.word[0], 0, 0x4440 | j);
    } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const unsigned word = same<Sample, short> ? packed.word[j] ^ 0x80008000u : packed.word[j];
            sum[2 * j] += SIGN * (word & 0xFFFFu);
            sum[2 * j + 1] += SIGN * (word >> 16);
        }
    }
}

// Word of a warp's row where sample `at` stands: 4 free words after each chunk keep the banks apart.
template <int WORDS>
__device__ inline int padded(int at) { return at + at / WORDS * 4; }

// Inclusive sums along the row over the samples of each channel, from each lane's chunk on its own to the whole row.
template <int CHANNELS>
__device__ inline void prefix_sums(unsigned (&sum)[CHUNK], int lane) {
#pragma unroll
    for (int j = CHANNELS; j < CHUNK; ++j) sum[j] += sum[j - CHANNELS];
    // Sample j of the lane belongs to channel (phase + j) % CHANNELS.
    const int phase = lane * CHUNK % CHANNELS;
    unsigned before[CHANNELS];
#pragma unroll
    for (int channel = 0; channel < CHANNELS; ++channel) {
        unsigned total = 0;
#pragma unroll
        for (int j = CHUNK - CHANNELS; j < CHUNK; ++j)
            if ((phase + j) % CHANNELS == channel) total = sum[j];
        unsigned scanned = total;
#pragma unroll
        for (int reach = 1; reach < 32; reach *= 2) {
            const unsigned other = __shfl_up_sync(~0u, scanned, reach);
            if (lane >= reach) scanned += other;
        }
        before[channel] = scanned - total;
    }
    unsigned mine[CHANNELS];
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
        mine[j] = before[0];
#pragma unroll
        for (int channel = 1; channel < CHANNELS; ++channel)
            if ((phase + j) % CHANNELS == channel) mine[j] = before[channel];
    }
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) sum[j] += mine[j % CHANNELS];
}

// The chunk's means: differences to the prefix sums that begin SHIFT words after `quads[0]`.
template <int SHIFT, typename Sample>
__device__ inline void means(Packed<Sample> (&done)[CHUNK / 4], const unsigned (&sum)[CHUNK], const uint4 (&quads)[9],
                             const Mean& mean) {
    unsigned right[36];
#pragma unroll
    for (int i = 0; i < 9; ++i)
        right[4 * i] = quads[i].x, right[4 * i + 1] = quads[i].y, right[4 * i + 2] = quads[i].z, right[4 * i + 3] = quads[i].w;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        unsigned bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            bits[j] = __umulhi(right[i + j + SHIFT] - sum[i + j] + mean.half, mean.multiplier) >> mean.shift;
        done[i / 4] = pack<Sample>(bits);
        if constexpr (same<Sample, short>) done[i / 4].word[0] ^= 0x80008000u, done[i / 4].word[1] ^= 0x80008000u;
    }
}

// Moves a lane's packed samples `skip` (0 … 3) places to the front; what follows comes from the next lane.
template <typename Sample>
__device__ inline void skip_samples(Packed<Sample> (&done)[CHUNK / 4], int skip) {
    constexpr int WORDS = CHUNK * sizeof(Sample) / 4, PER = sizeof(Sample);
    unsigned word[WORDS + 2];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = done[i / PER].word[i % PER];
    word[WORDS] = __shfl_down_sync(~0u, word[0], 1);
    word[WORDS + 1] = __shfl_down_sync(~0u, word[1], 1);
    const int bytes = skip * sizeof(Sample);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned low = bytes & 4 ? word[i + 1] : word[i], high = bytes & 4 ? word[i + 2] : word[i + 1];
        done[i / PER].word[i % PER] = __funnelshift_r(low, high, 8 * (bytes & 3));
    }
}

template <typename Sample, int CHANNELS>
__global__ void __launch_bounds__(RUNNING_THREADS, 2)
box_running(const Sample* __restrict__ in, Sample* __restrict__ out, Picture picture, Mean mean) {
    constexpr int WIDTH = 4 * RUNNING_THREADS, PITCH = WIDTH + WIDTH / CHUNK * 4, VECTOR = 16 / sizeof(Sample);
    constexpr int RESULT_WORDS = CHUNK * sizeof(Sample) / 4;  // of a lane
    __shared__ __align__(16) unsigned sums[ROWS][PITCH];
    const Place place = place_of(blockIdx.x, picture);
    const Sample* in_plane = in + place.plane * picture.rows * picture.row_samples;
    Sample* out_plane = out + place.plane * picture.out_rows * picture.out_row_samples;
    const int x = place.tile * mean.outputs, x_end = min(x + mean.outputs, picture.out_row_samples);
    const int y_begin = place.band * picture.band_rows, y_end = min(y_begin + picture.band_rows, picture.out_rows);
    // Prefix sum s is the one just before the window of output x + s - skip; `skip` makes the loads aligned.
    const int before = (mean.before_x + 1) * CHANNELS - picture.centre_x, skip = (4 - before % 4) % 4;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32, column = 4 * static_cast<int>(threadIdx.x);
    const Columns columns = columns_at<CHANNELS>(x - before - skip + column, picture);
    const int distance = mean.taps_x * CHANNELS;  // from the prefix sum before a window to its last

    unsigned sum[4] = {0, 0, 0, 0};
    Packed<Sample> entering[ROWS], leaving[ROWS];
    const int first = y_begin + picture.centre_y - mean.before_y - 1;  // of the window before the band's first
    for (int i = 0; i < mean.taps_y; i += ROWS) {
        load_rows<ROWS>(entering, in_plane, first + i, columns, picture);
#pragma unroll
        for (int k = 0; k < ROWS; ++k)
            if (i + k < mean.taps_y) accumulate<1>(sum, entering[k]);
    }
    load_rows<ROWS>(entering, in_plane, first + mean.taps_y, columns, picture);
    load_rows<ROWS>(leaving, in_plane, first, columns, picture);
#pragma unroll 1
    for (int y = y_begin; y < y_end; y += ROWS) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            accumulate<1>(sum, entering[i]);
            accumulate<-1>(sum, leaving[i]);
            *reinterpret_cast<uint4*>(&sums[i][padded<CHUNK>(column)]) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
        }
        if (y + ROWS < y_end) {
            const int next = first + y - y_begin + ROWS;
            load_rows<ROWS>(entering, in_plane, next + mean.taps_y, columns, picture);
            load_rows<ROWS>(leaving, in_plane, next, columns, picture);
        }
        __syncthreads();

        uint4* chunk = reinterpret_cast<uint4*>(&sums[row][padded<CHUNK>(lane * CHUNK)]);
        unsigned prefix[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i) {
            const uint4 quad = chunk[i];
            prefix[4 * i] = quad.x, prefix[4 * i + 1] = quad.y, prefix[4 * i + 2] = quad.z, prefix[4 * i + 3] = quad.w;
        }
        prefix_sums<CHANNELS>(prefix, lane);
#pragma unroll
        for (int i = 0; i < CHUNK / 4; ++i)
            chunk[i] = make_uint4(prefix[4 * i], prefix[4 * i + 1], prefix[4 * i + 2], prefix[4 * i + 3]);
        __syncwarp();
        uint4 quads[9];
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            const int at = min(lane * CHUNK + distance / 4 * 4 + 4 * i, WIDTH - 4);
            quads[i] = *reinterpret_cast<const uint4*>(&sums[row][padded<CHUNK>(at)]);
        }
        Packed<Sample> done[CHUNK / 4];
        switch (distance % 4) {
            case 0: means<0>(done, prefix, quads, mean); break;
            case 1: means<1>(done, prefix, quads, mean); break;
            case 2: means<2>(done, prefix, quads, mean); break;
            default: means<3>(done, prefix, quads, mean);
        }
        skip_samples(done, skip);
        __syncwarp();
        unsigned* staged = &sums[row][padded<RESULT_WORDS>(lane * RESULT_WORDS)];
#pragma unroll
        for (int i = 0; i < RESULT_WORDS; ++i) staged[i] = done[i / sizeof(Sample)].word[i % sizeof(Sample)];
        __syncwarp();
        if (y + row < y_end) {
            Sample* line = out_plane + (y + row) * static_cast<long long>(picture.out_row_samples);
#pragma unroll
            for (int i = 0; i < WIDTH / VECTOR / 32; ++i) {
                const int at = (lane + 32 * i) * VECTOR;
                const unsigned* from = &sums[row][padded<RESULT_WORDS>(at * sizeof(Sample) / 4)];
                if (picture.aligned_out && x + at + VECTOR <= x_end)
                    *reinterpret_cast<uint4*>(line + x + at) = *reinterpret_cast<const uint4*>(from);
                else
                    for (int j = 0; x + at + j < x_end && j < VECTOR; ++j)
                        line[x + at + j] = reinterpret_cast<const Sample*>(from)[j];
            }
        }
        __syncthreads();
    }
}
