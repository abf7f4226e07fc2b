// Kernels that each do one thing as fast as the device can, as limits for other kernels, and one that makes inputs.
//
//   copy_bytes    16 bytes a load and a store, one a thread (four a thread are 5 % slower on an H200)
//   read_bytes    16 bytes a load, eight in flight a thread; the values read go into a word that is almost never written
//   multiply_add  eight independent chains of float32 fused multiply-adds a thread
//   inverse_root  eight independent chains of float32 inverse roots a thread
//   fill_random   pseudo-random words, each from its own index

constexpr int THREADS = 256;
constexpr int CHAINS = 8;

__global__ void __launch_bounds__(THREADS)
copy_bytes(const uint4* __restrict__ in, uint4* __restrict__ out, long long vectors) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i < vectors) out[i] = in[i];
}

__global__ void __launch_bounds__(THREADS)
read_bytes(const uint4* __restrict__ in, unsigned* __restrict__ out, long long vectors) {
    constexpr int AT_ONCE = 8;
    const long long first = blockIdx.x * static_cast<long long>(THREADS * AT_ONCE) + threadIdx.x;
    uint4 loaded[AT_ONCE] = {};
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
        if (first + k * THREADS < vectors) loaded[k] = in[first + k * THREADS];
    unsigned mixed = 0;
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) mixed ^= loaded[k].x ^ loaded[k].y ^ loaded[k].z ^ loaded[k].w;
    if (mixed == 0x9e3779b9) out[0] = mixed;  // the compiler cannot know that this is rare
}

__global__ void __launch_bounds__(THREADS) multiply_add(float* __restrict__ out, int rounds, float a, float b) {
    float chain[CHAINS];
#pragma unroll
    for (int k = 0; k < CHAINS; ++k) chain[k] = threadIdx.x + k;
#pragma unroll 16
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int k = 0; k < CHAINS; ++k) chain[k] = fmaf(chain[k], a, b);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < CHAINS; ++k) sum += chain[k];
    if (sum == 12345.678f) out[0] = sum;
}

__global__ void __launch_bounds__(THREADS) inverse_root(float* __restrict__ out, int rounds) {
    float chain[CHAINS];
#pragma unroll
    for (int k = 0; k < CHAINS; ++k) chain[k] = 1.5f + threadIdx.x + k;
#pragma unroll 16
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int k = 0; k < CHAINS; ++k) asm volatile("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(chain[k]));
    float sum = 0;
#pragma unroll
    for (int k = 0; k < CHAINS; ++k) sum += chain[k];
    if (sum == 12345.678f) out[0] = sum;
}

// A bijection of 64 bits (Steele, Lea and Flood's SplitMix64).
__global__ void __launch_bounds__(THREADS)
fill_random(unsigned long long* __restrict__ out, long long count, unsigned long long seed) {
    const long long i = blockIdx.x * static_cast<long long>(THREADS) + threadIdx.x;
    if (i >= count) return;
    unsigned long long z = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    out[i] = z ^ z >> 31;
}
