// Keys mapped to unsigned integers of the same order, so that all kernels compare and count digits in the same way.
#pragma once

using Key32 = unsigned;
using Key64 = unsigned long long;

// The type of the keys; also in cuda.py.
enum Kind { UNSIGNED, SIGNED, FLOATING };

// Values that move with the keys: none, or any 4 bytes. Other values are gathered once, at the end, by 4-byte indices: in
// a radix sort of 4-byte keys that moves no more bytes, and it halves the compile time.
struct NoValue {};
using Value32 = unsigned;
template <typename Value>
constexpr bool HAS_VALUES = true;
template <>
constexpr bool HAS_VALUES<NoValue> = false;

template <typename Key>
constexpr Key TOP_BIT = Key(1) << (8 * sizeof(Key) - 1);

// The image of -inf before it is subtracted; the images below are NaNs of negative sign, which wrap around to the end.
template <typename Key>
constexpr Key MINUS_INFINITY = sizeof(Key) == 4 ? Key(0x007fffffu) : Key(0x000fffffffffffffull);

// Both are bijections, inverse to each other: -inf < ... < -0 < +0 < ... < +inf < NaN, NaNs by their bits.
template <typename Key>
__device__ inline Key ordered(Key bits, int kind) {
    if (kind == UNSIGNED) return bits;
    if (kind == SIGNED) return bits ^ TOP_BIT<Key>;
    return (bits & TOP_BIT<Key> ? ~bits : bits | TOP_BIT<Key>) - MINUS_INFINITY<Key>;
}

template <typename Key>
__device__ inline Key unordered(Key key, int kind) {
    if (kind == UNSIGNED) return key;
    if (kind == SIGNED) return key ^ TOP_BIT<Key>;
    const Key flipped = key + MINUS_INFINITY<Key>;
    return flipped & TOP_BIT<Key> ? flipped & ~TOP_BIT<Key> : ~flipped;
}

// Maps an array to ordered integers, or back. `to` may be `from`.
template <typename Key>
__global__ void order_keys(const Key* from, Key* to, long long count, int kind, int back) {
    const long long step = gridDim.x * static_cast<long long>(blockDim.x);
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count; i += step)
        to[i] = back ? unordered(from[i], kind) : ordered(from[i], kind);
}
