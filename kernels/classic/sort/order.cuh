// Keys as unsigned integers whose order is the keys' own, so that every kernel compares and counts digits alike.
#pragma once

using Key32 = unsigned;
using Key64 = unsigned long long;

// What the bits of a key stand for; in cuda.py too.
enum Kind { UNSIGNED, SIGNED, FLOATING };

// Values that travel with the keys: none, or 4 bytes, whatever they mean. Wider ones are fetched once, at the end, by 4
// bytes that say where they are: in a radix sort of keys of 4 bytes that moves no more, and it compiles in half the time.
struct NoValue {};
using Value32 = unsigned;
template <typename Value>
constexpr bool HAS_VALUES = true;
template <>
constexpr bool HAS_VALUES<NoValue> = false;

template <typename Key>
constexpr Key TOP_BIT = Key(1) << (8 * sizeof(Key) - 1);

// Bits of -inf, with all but the sign inverted below: what lies under it are NaNs of negative sign, which go to the end.
template <typename Key>
constexpr Key MINUS_INFINITY = sizeof(Key) == 4 ? Key(0x007fffffu) : Key(0x000fffffffffffffull);

// To order and back are bijections: -inf < ... < -0 < +0 < ... < +inf < NaN, NaNs by their bits.
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

// A whole array there, or back. In place where `to` is `from`.
template <typename Key>
__global__ void order_keys(const Key* from, Key* to, long long count, int kind, int back) {
    const long long step = gridDim.x * static_cast<long long>(blockDim.x);
    for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count; i += step)
        to[i] = back ? unordered(from[i], kind) : ordered(from[i], kind);
}
