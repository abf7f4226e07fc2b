// The bilateral filter as one would first write it, for bilateral.py. Macros give the window (DEEP, RADIUS: samples on each
// side), the exponents' factors BY_VALUE and BY_PLACE, the image's type Sample, and ROUND, rintf for integers.

struct Mean {
    float centre, total, weights;

    __device__ void add(float value, int dz, int dy, int dx) {
        const float apart = value - centre, far = (dx * dx + dy * dy + dz * dz) * BY_PLACE;
        const float weight = __expf(apart * apart * BY_VALUE + far);
        total += weight * value;
        weights += weight;
    }
};

// For cupyx's generic_filter: the samples of one window.
extern "C" __global__ void of_window(double* window, int count, double* result) {
    Mean mean = {static_cast<float>(window[count / 2]), 0, 0};
    int at = 0;
    for (int dz = -DEEP; dz <= DEEP; ++dz)
        for (int dy = -RADIUS; dy <= RADIUS; ++dy)
            for (int dx = -RADIUS; dx <= RADIUS; ++dx) mean.add(window[at++], dz, dy, dx);
    *result = ROUND(mean.total / mean.weights);
}

// One result a thread, blocks of 32 x 8; edges are continued.
extern "C" __global__ void of_pixel(const Sample* __restrict__ in, Sample* __restrict__ out, int planes, int rows, int columns) {
    const int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 8 + threadIdx.y, z = blockIdx.z;
    if (x >= columns || y >= rows) return;
    const auto at = [=](int z, int y, int x) { return (static_cast<long long>(z) * rows + y) * columns + x; };
    const auto within = [](int i, int count) { return min(max(i, 0), count - 1); };
    Mean mean = {static_cast<float>(in[at(z, y, x)]), 0, 0};
    for (int dz = -DEEP; dz <= DEEP; ++dz)
        for (int dy = -RADIUS; dy <= RADIUS; ++dy)
            for (int dx = -RADIUS; dx <= RADIUS; ++dx)
                mean.add(in[at(within(z + dz, planes), within(y + dy, rows), within(x + dx, columns))], dz, dy, dx);
    out[at(z, y, x)] = ROUND(mean.total / mean.weights);
}
