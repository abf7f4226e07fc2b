// The rolling ball, as kernels/rolling_ball/__init__.py defines it, on arrays of [planes, three axes] with the halo of the
// ball's caps, which the result lacks.
//
// Floors of N samples of b bytes with w taps in the ball, on a device with bandwidth B that starts C operations a second
// (28 T/s of an H200 at 1.755 GHz):
//   bytes       2 N b / B    each sample is read once and written once
//   operations  2 w N / C    a sum and a minimum a tap
//
//   ball_tiles   a block computes 32 × 32 results; the samples of some of the window's rows lie in shared memory. A thread
//                keeps four results in registers.
//
//                  |  barrier     the rows before have been read; no block waits for another
//                all threads    BAND rows of the window -> shared memory
//                  |  barrier     the rows are complete
//                each thread    the ball's taps in these rows -> heights; after the last rows, results

constexpr int ACROSS = 32, DOWN = 8, EACH = 4, SIDE = DOWN * EACH, BAND = 16;

struct BallTask {
    int lengths[3], taps[3];
    long long tiles_y, tiles_x, blocks;
    int sign, unused;
};

template <typename Real>
__global__ void __launch_bounds__(ACROSS * DOWN) ball_tiles(
    const Real* __restrict__ in, Real* __restrict__ out, const Real* __restrict__ caps, BallTask task) {
    extern __shared__ double shared[];
    Real* tile = reinterpret_cast<Real*>(shared);
    const Real none = static_cast<Real>(__int_as_float(0x7F800000));
    const int outs_z = task.lengths[0] - task.taps[0] + 1, outs_y = task.lengths[1] - task.taps[1] + 1;
    const int outs_x = task.lengths[2] - task.taps[2] + 1;
    const int columns = ACROSS + task.taps[2] - 1, x = threadIdx.x, y = threadIdx.y;
    for (long long block = blockIdx.x; block < task.blocks; block += gridDim.x) {
        long long rest = block / task.tiles_x;
        const int x0 = static_cast<int>(block % task.tiles_x) * ACROSS, y0 = static_cast<int>(rest % task.tiles_y) * SIDE;
        rest /= task.tiles_y;
        const int z0 = static_cast<int>(rest % outs_z);
        const long long plane = rest / outs_z;
        Real lowest[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) lowest[e] = none;
        for (int dz = 0; dz < task.taps[0]; ++dz)
            for (int band = 0; band < task.taps[1]; band += BAND) {
                const int rows = min(BAND, task.taps[1] - band);
                __syncthreads();
                for (int i = y; i < SIDE + rows - 1; i += DOWN) {
                    const int from_y = min(y0 + band + i, task.lengths[1] - 1);  // the last tiles need no more
                    const Real* line = in + ((plane * task.lengths[0] + z0 + dz) * task.lengths[1] + from_y) * task.lengths[2];
                    for (int j = x; j < columns; j += ACROSS) {
                        const Real sample = line[min(x0 + j, task.lengths[2] - 1)];
                        tile[i * columns + j] = task.sign > 0 ? sample : -sample;
                    }
                }
                __syncthreads();
                for (int dy = 0; dy < rows; ++dy) {
                    const Real* cap = caps + (dz * task.taps[1] + band + dy) * task.taps[2];
                    for (int dx = 0; dx < task.taps[2]; ++dx) {
                        const Real below = __ldg(cap + dx);
                        if (below == none) continue;
#pragma unroll
                        for (int e = 0; e < EACH; ++e) {
                            const Real height = tile[(y + e * DOWN + dy) * columns + x + dx] + below;
                            lowest[e] = height < lowest[e] ? height : lowest[e];
                        }
                    }
                }
            }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int at_y = y0 + y + e * DOWN, at_x = x0 + x;
            if (at_y < outs_y && at_x < outs_x)
                out[((plane * outs_z + z0) * outs_y + at_y) * outs_x + at_x] = task.sign > 0 ? lowest[e] : -lowest[e];
        }
    }
}
