// Transposes of batches of matrices; the contract is in kernels/classic/transpose/__init__.py.
//
// `in` holds batches of rows × columns elements, rows `row_pitch` and matrices `batch_pitch` elements apart; `out` the
// same matrices transposed, columns × rows each, without gaps. An element is 1, 2, 4, 8 or 16 bytes: T is an unsigned
// type of that size, since elements are only copied.
//
// Floors: 2 × bytes over the bandwidth of a copy; no arithmetic.
//
// Naive to fast:
//   copy_vectors           no transpose: a plain copy of the same bytes, the upper bound
//   transpose_naive        one thread per element: reads follow the rows, writes go down a column
//   transpose_tiled        a tile of 32 × 32 in shared memory, so that writes follow rows; padded, no bank conflicts
//   transpose_coarsened    several elements per thread, tiles of any shape
//   transpose_vectors      16 bytes per load and store, any row alignment; small elements turned in registers, swizzled tiles
// Source: Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA" (NVIDIA, 2009).

#include "shifted.cuh"

struct Matrices {
    long long rows, columns, row_pitch, batch_pitch;  // elements, of the input
    long long first_batch;
    unsigned tiles_down, tiles_across;  // of one matrix
};

constexpr int TILE = 32;
constexpr int THREADS = 256;

struct Corner {
    long long batch, row, column;  // the tile's first element
};

// Tiles of HEIGHT × WIDTH elements are numbered down the columns, then across, then by batch: blocks that run together
// write neighbouring parts of the output's rows (H200: up to 8 % faster than along the input's rows).
template <int HEIGHT, int WIDTH>
__device__ inline Corner corner_of(const Matrices& matrices) {
    const unsigned down = blockIdx.x % matrices.tiles_down, rest = blockIdx.x / matrices.tiles_down;
    const unsigned across = rest % matrices.tiles_across;
    return {matrices.first_batch + rest / matrices.tiles_across, static_cast<long long>(down) * HEIGHT,
            static_cast<long long>(across) * WIDTH};
}

__device__ inline long long from(const Matrices& matrices, long long batch, long long row, long long column) {
    return batch * matrices.batch_pitch + row * matrices.row_pitch + column;
}

__device__ inline long long to(const Matrices& matrices, long long batch, long long row, long long column) {
    return (batch * matrices.columns + column) * matrices.rows + row;
}

// copy_vectors: the upper bound for a transpose.
__global__ void __launch_bounds__(THREADS)
copy_vectors(const uint4* __restrict__ in, uint4* __restrict__ out, long long bytes) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < bytes / 16) out[i] = in[i];
    const long long rest = bytes / 16 * 16 + i;
    if (i < 16 && rest < bytes)
        reinterpret_cast<unsigned char*>(out)[rest] = reinterpret_cast<const unsigned char*>(in)[rest];
}

// transpose_naive: one thread per element. A warp reads one run of a row and writes to 32 sectors of 32 bytes, a column's
// length apart, and uses one element of each.
template <typename T>
__global__ void __launch_bounds__(TILE * TILE)
transpose_naive(const T* __restrict__ in, T* __restrict__ out, Matrices matrices) {
    const Corner corner = corner_of<TILE, TILE>(matrices);
    const long long row = corner.row + threadIdx.y, column = corner.column + threadIdx.x;
    if (row < matrices.rows && column < matrices.columns)
        out[to(matrices, corner.batch, row, column)] = in[from(matrices, corner.batch, row, column)];
}

// transpose_tiled: the tile is transposed in shared memory, so that a warp also writes a run of a row. With PAD = 0 a column
// of the tile is in one bank, and a warp needs 32 accesses to read it; padding of one element spreads it over all banks.
template <typename T, int PAD>
__global__ void __launch_bounds__(TILE * TILE)
transpose_tiled(const T* __restrict__ in, T* __restrict__ out, Matrices matrices) {
    __shared__ T tile[TILE][TILE + PAD];
    const Corner corner = corner_of<TILE, TILE>(matrices);
    long long row = corner.row + threadIdx.y, column = corner.column + threadIdx.x;
    if (row < matrices.rows && column < matrices.columns)
        tile[threadIdx.y][threadIdx.x] = in[from(matrices, corner.batch, row, column)];
    __syncthreads();
    row = corner.row + threadIdx.x;
    column = corner.column + threadIdx.y;
    if (row < matrices.rows && column < matrices.columns)
        out[to(matrices, corner.batch, row, column)] = tile[threadIdx.x][threadIdx.y];
}

// transpose_coarsened: 32 × 8 threads process a tile, so that each has several loads in flight and computes addresses once.
// Tiles of 64 × 64 also make memory accesses twice as long.
template <typename T, int HEIGHT, int WIDTH>
__global__ void __launch_bounds__(THREADS)
transpose_coarsened(const T* __restrict__ in, T* __restrict__ out, Matrices matrices) {
    __shared__ T tile[HEIGHT][WIDTH + 1];
    const Corner corner = corner_of<HEIGHT, WIDTH>(matrices);
    const int x = threadIdx.x, y = threadIdx.y;
    const T* source = in + from(matrices, corner.batch, corner.row, corner.column);
    T* target = out + to(matrices, corner.batch, corner.row, corner.column);
    const long long rows = matrices.rows - corner.row, columns = matrices.columns - corner.column;
#pragma unroll
    for (int r = 0; r < HEIGHT; r += 8)
#pragma unroll
        for (int c = 0; c < WIDTH; c += 32)
            if (r + y < rows && c + x < columns) tile[r + y][c + x] = source[(r + y) * matrices.row_pitch + c + x];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < WIDTH; c += 8)
#pragma unroll
        for (int r = 0; r < HEIGHT; r += 32)
            if (r + x < rows && c + y < columns) target[(c + y) * matrices.rows + r + x] = tile[r + x][c + y];
}

// The registers of a thread of transpose_vectors between global and shared memory: 16 bytes of each of DEEP rows, transposed
// to cells of DEEP elements of a column. A cell is a word, or one element if that is larger.
template <int SIZE>
struct Turned {
    typedef unsigned Element;
    typedef unsigned Cell;
    static constexpr int DEEP = 1;
    static __device__ inline void turn(const uint4 (&rows)[1], unsigned (&cells)[4]) {
        cells[0] = rows[0].x, cells[1] = rows[0].y, cells[2] = rows[0].z, cells[3] = rows[0].w;
    }
};

template <>
struct Turned<1> {
    typedef unsigned char Element;
    typedef unsigned Cell;
    static constexpr int DEEP = 4;
    static __device__ inline void four(unsigned a, unsigned b, unsigned c, unsigned d, unsigned* cells) {
        const unsigned low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
        const unsigned low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
        cells[0] = __byte_perm(low_ab, low_cd, 0x5410), cells[1] = __byte_perm(low_ab, low_cd, 0x7632);
        cells[2] = __byte_perm(high_ab, high_cd, 0x5410), cells[3] = __byte_perm(high_ab, high_cd, 0x7632);
    }
    static __device__ inline void turn(const uint4 (&rows)[4], unsigned (&cells)[16]) {
        four(rows[0].x, rows[1].x, rows[2].x, rows[3].x, cells);
        four(rows[0].y, rows[1].y, rows[2].y, rows[3].y, cells + 4);
        four(rows[0].z, rows[1].z, rows[2].z, rows[3].z, cells + 8);
        four(rows[0].w, rows[1].w, rows[2].w, rows[3].w, cells + 12);
    }
};

template <>
struct Turned<2> {
    typedef unsigned short Element;
    typedef unsigned Cell;
    static constexpr int DEEP = 2;
    static __device__ inline void turn(const uint4 (&rows)[2], unsigned (&cells)[8]) {
        const unsigned above[4] = {rows[0].x, rows[0].y, rows[0].z, rows[0].w};
        const unsigned below[4] = {rows[1].x, rows[1].y, rows[1].z, rows[1].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            cells[2 * k] = __byte_perm(above[k], below[k], 0x5410);
            cells[2 * k + 1] = __byte_perm(above[k], below[k], 0x7632);
        }
    }
};

template <>
struct Turned<8> {
    typedef uint2 Element;
    typedef uint2 Cell;
    static constexpr int DEEP = 1;
    static __device__ inline void turn(const uint4 (&rows)[1], uint2 (&cells)[2]) {
        cells[0] = make_uint2(rows[0].x, rows[0].y), cells[1] = make_uint2(rows[0].z, rows[0].w);
    }
};

template <>
struct Turned<16> {
    typedef uint4 Element;
    typedef uint4 Cell;
    static constexpr int DEEP = 1;
    static __device__ inline void turn(const uint4 (&rows)[1], uint4 (&cells)[1]) { cells[0] = rows[0]; }
};

// transpose_vectors: every memory access is 16 bytes, for elements of SIZE bytes. The tile in shared memory is already
// transposed; VECTORS and QUADS are its 16-byte pieces along a row of the input and of the output. A piece is stored at its
// index XOR the input vector of its column, so that neither writes of cells nor reads of whole pieces have bank conflicts.
// ALIGNED: rows are multiples of 16 bytes in the input and of sectors in the output. Otherwise a row's bytes are assembled
// from the aligned pieces around them (element by element at the matrix's ends), and every row of the output is split where
// its own memory sectors begin: tiles hold up to a sector more than they write, and only a row's ends are written element by
// element. Sectors written by two tiles would cost much more.
constexpr int SECTOR = 32;

template <int SIZE, int VECTORS, int QUADS, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
transpose_vectors(const unsigned char* __restrict__ in, unsigned char* __restrict__ out, Matrices matrices) {
    typedef Turned<SIZE> Way;
    typedef typename Way::Cell Cell;
    typedef typename Way::Element Element;
    constexpr int ACROSS = 16 / SIZE, DEEP = Way::DEEP, CELLS_A_QUAD = 16 / sizeof(Cell);
    constexpr int COLUMNS = VECTORS * ACROSS, ROWS = QUADS * ACROSS;
    constexpr int UNITS = VECTORS * ROWS / DEEP / THREADS, PANELS = VECTORS / 8;
    constexpr int SPARE = ALIGNED ? 0 : SECTOR / SIZE, WRITTEN = QUADS - SPARE / ACROSS;  // rows and pieces
    static_assert(UNITS * THREADS * DEEP == VECTORS * ROWS && VECTORS % 8 == 0 && QUADS % 8 == 0, "whole units");
    __shared__ uint4 tile[COLUMNS * QUADS];
    const Corner corner = corner_of<ROWS - SPARE, COLUMNS>(matrices);
    const long long rows = matrices.rows - corner.row, columns = matrices.columns - corner.column;
    const unsigned char* source = in + from(matrices, corner.batch, corner.row, corner.column) * SIZE;
    unsigned char* target = out + to(matrices, corner.batch, corner.row, corner.column) * SIZE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const unsigned char* begin = in + from(matrices, corner.batch, 0, 0) * SIZE;
    const unsigned char* end = in + from(matrices, corner.batch, matrices.rows - 1, matrices.columns) * SIZE;
    const bool at_ends = !ALIGNED && (corner.row < 16 || corner.row + ROWS + 16 > matrices.rows);
    const auto exists = [&](const uint4* piece) {
        const auto at = reinterpret_cast<const unsigned char*>(piece);
        return !at_ends || (at >= begin && at + 16 <= end);
    };
    // A warp takes 8 vectors of 4 × DEEP rows at a time. All that a thread loads is in flight before it uses any.
    const auto vector_of = [&](int k) { return lane % 8 + (warp + k * (THREADS / 32)) % PANELS * 8; };
    const auto cell_of = [&](int k) { return lane / 8 + (warp + k * (THREADS / 32)) / PANELS * 4; };
    uint4 loaded[UNITS][DEEP], beside[UNITS][DEEP];
    unsigned past[UNITS][DEEP];  // offset in the piece, bytes
#pragma unroll
    for (int k = 0; k < UNITS; ++k) {
        const int vector = vector_of(k), first = cell_of(k) * DEEP;
        const long long wanted = (columns - vector * ACROSS) * SIZE;
        if (first >= rows || wanted <= 0) continue;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            if (!ALIGNED && first + d >= rows) continue;
            const unsigned char* at = source + (first + d) * matrices.row_pitch * SIZE + vector * 16;
            if (ALIGNED) {
                loaded[k][d] = *reinterpret_cast<const uint4*>(at);
                continue;
            }
            past[k][d] = reinterpret_cast<unsigned long long>(at) % 16;
            const uint4* piece = reinterpret_cast<const uint4*>(at - past[k][d]);
            if (exists(piece)) loaded[k][d] = piece[0];
            if (past[k][d] != 0 && past[k][d] + wanted > 16 && exists(piece + 1)) beside[k][d] = piece[1];
        }
    }
#pragma unroll
    for (int k = 0; k < UNITS; ++k) {
        const int vector = vector_of(k), cell = cell_of(k), quad = cell / CELLS_A_QUAD;
        if (cell * DEEP >= rows || vector * ACROSS >= columns) continue;
        if (!ALIGNED)
#pragma unroll
            for (int d = 0; d < DEEP; ++d) loaded[k][d] = shifted<SIZE>(loaded[k][d], beside[k][d], past[k][d]);
        Cell cells[ACROSS];
        Way::turn(loaded[k], cells);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            uint4* piece = tile + (vector * ACROSS + j) * QUADS + (quad ^ vector % 8);
            reinterpret_cast<Cell*>(piece)[cell % CELLS_A_QUAD] = cells[j];
        }
    }
    __syncthreads();
    const auto turned = [&](int column, int quad) -> uint4& { return tile[column * QUADS + (quad ^ column / ACROSS % 8)]; };
    const auto element = [&](int column, int row) -> Element& {
        return reinterpret_cast<Element*>(&turned(column, row / ACROSS))[row % ACROSS];
    };
    if (at_ends) {
        // The first elements, and the last ones that are not among them.
        const int k = threadIdx.x;
        const long long last = (matrices.rows - 1) * matrices.row_pitch + matrices.columns - 1;
        const long long n = k < ACROSS ? k : last - (k - ACROSS);
        const bool wanted = k < 2 * ACROSS && n >= (k < ACROSS ? 0 : ACROSS) && n <= last;
        const long long row = n / matrices.row_pitch - corner.row, column = n % matrices.row_pitch - corner.column;
        if (wanted && row >= 0 && row < ROWS && column >= 0 && column < min(columns, 0ll + COLUMNS))
            element(column, row) = reinterpret_cast<const Element*>(begin)[n];
        __syncthreads();
    }
    // Bytes to the first sector boundary in a row of the output.
    const auto skipped = [&](int column) {
        return ALIGNED ? 0u : -static_cast<unsigned>(reinterpret_cast<unsigned long long>(target) +
                                                     column * matrices.rows * SIZE) % SECTOR;
    };
    const auto write = [&](int column, int row) {  // an element
        reinterpret_cast<Element*>(target)[column * matrices.rows + row] = element(column, row);
    };
#pragma unroll
    for (int k = 0; k < (COLUMNS * WRITTEN + THREADS - 1) / THREADS; ++k) {
        const int unit = threadIdx.x + k * THREADS, column = unit / WRITTEN, quad = unit % WRITTEN;
        if (column >= min(columns, static_cast<long long>(COLUMNS))) continue;
        const unsigned skip = skipped(column);
        const int row = quad * ACROSS + skip / SIZE;
        if (row + (ALIGNED ? 1 : ACROSS) <= rows) {
            const int at = quad + skip / 16;
            *reinterpret_cast<uint4*>(target + column * matrices.rows * SIZE + skip + quad * 16) =
                ALIGNED ? turned(column, at) : shifted<SIZE>(turned(column, at), turned(column, at + 1), skip % 16);
        } else if (!ALIGNED) {
            for (int r = row; r < rows; ++r) write(column, r);
        }
    }
    if (ALIGNED || corner.row != 0) return;
    for (int unit = threadIdx.x; unit < COLUMNS * SPARE; unit += THREADS) {
        const int column = unit / SPARE, row = unit % SPARE;
        if (column < columns && row < rows && row * SIZE < skipped(column)) write(column, row);
    }
}
