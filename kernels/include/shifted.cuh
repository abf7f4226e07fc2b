// Reads and writes of unaligned rows of memory, 16 bytes at a time.
#pragma once

// 16 bytes of two neighbouring pieces of 16, from `bytes` on (0 … 15), a multiple of SIZE, the size of an element.
template <int SIZE>
__device__ inline uint4 shifted(uint4 low, uint4 high, unsigned bytes) {
    unsigned word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (SIZE <= 8)
#pragma unroll
        for (int w = 0; w < 6; ++w) word[w] = bytes & 8 ? word[w + 2] : word[w];
    if (SIZE <= 4)
#pragma unroll
        for (int w = 0; w < 5; ++w) word[w] = bytes & 4 ? word[w + 1] : word[w];
    if (SIZE <= 2)
#pragma unroll
        for (int w = 0; w < 4; ++w) word[w] = __funnelshift_r(word[w], word[w + 1], bytes % 4 * 8);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// 16 unaligned bytes. Up to 15 bytes before and behind them are read too.
template <typename Element>
__device__ inline uint4 load_anywhere(const Element* at) {
    const unsigned past = reinterpret_cast<unsigned long long>(at) % 16;
    const uint4* pieces = reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(at) - past);
    return shifted<sizeof(Element)>(__ldg(pieces), __ldg(pieces + (past != 0)), past);
}

// Without this, the compiler splits a conditional store into four.
__device__ inline void store_16_bytes(void* to, uint4 vector) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(vector.x), "r"(vector.y), "r"(vector.z),
                 "r"(vector.w)
                 : "memory");
}

// The same if `wanted`. No branch keeps the loads and shifts before it apart from those of other vectors.
__device__ inline void store_16_bytes_if(bool wanted, void* to, uint4 vector) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
                 "r"(vector.x), "r"(vector.y), "r"(vector.z), "r"(vector.w), "r"(static_cast<unsigned>(wanted)));
}

// A warp writes `count` elements (at most MOST) to `line`: 16 bytes at a time where they are aligned, single ones at the ends.
// element(i) is the i-th of them, vector(i) their i-th 16 bytes; one vector more than is written may be read.
template <int MOST, typename Element, typename Vector, typename Single>
__device__ inline void store_anywhere(Element* line, int count, Vector vector, Single element) {
    constexpr int SIZE = sizeof(Element), VECTOR = 16 / SIZE;
    const int lane = threadIdx.x % 32;
    const int before = -static_cast<unsigned>(reinterpret_cast<unsigned long long>(line)) % 16 / SIZE;
    const int whole = max(count - before, 0) / VECTOR, behind = before + whole * VECTOR;
#pragma unroll
    for (int i = lane; i - lane < MOST / VECTOR; i += 32)
        if (i < whole) store_16_bytes(line + before + i * VECTOR, shifted<SIZE>(vector(i), vector(i + 1), before * SIZE));
    const int at = lane < before ? lane : behind + lane - before;
    if (at < count) line[at] = element(at);
}
