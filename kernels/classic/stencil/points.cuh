// The first steps: one thread per point, or per column along z. Floor: 8 bytes per point over the device's bandwidth.
#pragma once

struct Field {
    int nx, ny, nz;
    int depth;  // planes of a block; blocks are numbered along x, then y, then by slabs of planes
    float centre, neighbour;
};

// The order of additions in every kernel, without FMA.
__device__ inline float stepped(const Field& field, float here, float west, float east, float south, float north, float below,
                                float above) {
    const float sum = __fadd_rn(__fadd_rn(__fadd_rn(west, east), __fadd_rn(south, north)), __fadd_rn(below, above));
    return __fadd_rn(__fmul_rn(field.centre, here), __fmul_rn(field.neighbour, sum));
}

// A block's first point and its slab of planes.
struct Block {
    int x, y, z_first, z_end;

    __device__ Block(const Field& field, int columns, int rows) {
        const unsigned across = (field.nx + columns - 1) / columns, down = (field.ny + rows - 1) / rows;
        x = static_cast<int>(blockIdx.x % across) * columns;
        y = static_cast<int>(blockIdx.x / across % down) * rows;
        z_first = static_cast<int>(blockIdx.x / across / down) * field.depth;
        z_end = min(z_first + field.depth, field.nz);
    }
};

constexpr int TILE_X = 32, TILE_Y = 8;

struct Column {
    int x, y;
    long long row, plane, first;  // strides of rows and planes; index of (x, y) in the first plane
    bool exists, inside;

    __device__ Column(const Field& field, const Block& block) {
        x = block.x + threadIdx.x % TILE_X;
        y = block.y + threadIdx.x / TILE_X;
        row = field.nx;
        plane = row * field.ny;
        first = y * row + x;
        exists = x < field.nx && y < field.ny;
        inside = x > 0 && x < field.nx - 1 && y > 0 && y < field.ny - 1;
    }
};

// naive: one thread per point. Each point is read seven times, six of them from caches if these are large enough.
__global__ void __launch_bounds__(256) naive(const float* __restrict__ from, float* __restrict__ to, Field field) {
    const Block block(field, TILE_X, TILE_Y);
    const Column column(field, block);
    const int z = block.z_first;
    if (!column.exists) return;
    const long long i = column.first + z * column.plane;
    float value = from[i];
    if (column.inside && z > 0 && z < field.nz - 1)
        value = stepped(field, value, from[i - 1], from[i + 1], from[i - column.row], from[i + column.row],
                        from[i - column.plane], from[i + column.plane]);
    to[i] = value;
}

// pencil: one thread per column. Indices are computed once, and the points of the next plane are still in the cache when
// they are needed again.
__global__ void __launch_bounds__(256) pencil(const float* __restrict__ from, float* __restrict__ to, Field field) {
    const Block block(field, TILE_X, TILE_Y);
    const Column column(field, block);
    if (!column.exists) return;
    long long i = column.first + block.z_first * column.plane;
    for (int z = block.z_first; z < block.z_end; ++z, i += column.plane) {
        float value = from[i];
        if (column.inside && z > 0 && z < field.nz - 1)
            value = stepped(field, value, from[i - 1], from[i + 1], from[i - column.row], from[i + column.row],
                            from[i - column.plane], from[i + column.plane]);
        to[i] = value;
    }
}

// register_queue: below, here and above move through three registers, so that a column's points are read once.
__global__ void __launch_bounds__(256) register_queue(const float* __restrict__ from, float* __restrict__ to, Field field) {
    const Block block(field, TILE_X, TILE_Y);
    const Column column(field, block);
    if (!column.exists) return;
    long long i = column.first + block.z_first * column.plane;
    float below = block.z_first > 0 ? from[i - column.plane] : 0.0f, here = from[i];
    for (int z = block.z_first; z < block.z_end; ++z, i += column.plane) {
        const float above = z < field.nz - 1 ? from[i + column.plane] : 0.0f;
        float value = here;
        if (column.inside && z > 0 && z < field.nz - 1)
            value = stepped(field, here, from[i - 1], from[i + 1], from[i - column.row], from[i + column.row], below, above);
        to[i] = value;
        below = here;
        here = above;
    }
}

// shared_plane: the current plane is also in shared memory, so that global memory is read once per point, plus the points
// around the tile. Two buffers: one barrier per plane.
__global__ void __launch_bounds__(256) shared_plane(const float* __restrict__ from, float* __restrict__ to, Field field) {
    __shared__ float tile[2][TILE_Y + 2][TILE_X + 2];
    const Block block(field, TILE_X, TILE_Y);
    const Column column(field, block);
    const int tx = threadIdx.x % TILE_X + 1, ty = threadIdx.x / TILE_X + 1;
    long long i = column.first + block.z_first * column.plane;
    float below = column.exists && block.z_first > 0 ? from[i - column.plane] : 0.0f;
    float here = column.exists ? from[i] : 0.0f;
    int buffer = 0;
    for (int z = block.z_first; z < block.z_end; ++z, i += column.plane, buffer ^= 1) {
        const float above = column.exists && z < field.nz - 1 ? from[i + column.plane] : 0.0f;
        tile[buffer][ty][tx] = here;
        if (column.inside) {
            if (tx == 1) tile[buffer][ty][0] = from[i - 1];
            if (tx == TILE_X) tile[buffer][ty][TILE_X + 1] = from[i + 1];
            if (ty == 1) tile[buffer][0][tx] = from[i - column.row];
            if (ty == TILE_Y) tile[buffer][TILE_Y + 1][tx] = from[i + column.row];
        }
        __syncthreads();
        float value = here;
        if (column.inside && z > 0 && z < field.nz - 1)
            value = stepped(field, here, tile[buffer][ty][tx - 1], tile[buffer][ty][tx + 1], tile[buffer][ty - 1][tx],
                            tile[buffer][ty + 1][tx], below, above);
        if (column.exists) to[i] = value;
        below = here;
        here = above;
    }
}
