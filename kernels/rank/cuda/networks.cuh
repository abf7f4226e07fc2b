// Networks of compare-exchanges over arrays of registers. Part of rank.cu.
//
// What a caller does not use of a result is not computed: the compiler drops the exchanges that only lead there, and half
// of those of which one end is not used. Source: Batcher, "Sorting networks and their applications" (1968).
#pragma once

// Two samples of 16 bits side by side, each compared with the one in the same half. SUMS: of six exchanges, how many find the
// larger one by a sum.
template <int SUMS>
struct Pair {
    unsigned bits;
};
using Two = Pair<0>;
template <int SUMS>
__device__ inline Pair<SUMS> low(Pair<SUMS> a, Pair<SUMS> b) { return {__vminu2(a.bits, b.bits)}; }
template <int SUMS>
__device__ inline Pair<SUMS> high(Pair<SUMS> a, Pair<SUMS> b) { return {__vmaxu2(a.bits, b.bits)}; }
template <typename Key>
constexpr int sums_of = 0;
template <int SUMS>
constexpr int sums_of<Pair<SUMS>> = SUMS;

// One key of 32 bits.
struct One {
    unsigned bits;
};
__device__ inline One low(One a, One b) { return {min(a.bits, b.bits)}; }
__device__ inline One high(One a, One b) { return {max(a.bits, b.bits)}; }

template <typename Key>
__device__ inline void exchange(Key& a, Key& b) {
    const Key lower = low(a, b);
    b = high(a, b);
    a = lower;
}

// The same with one comparison: the larger key is the sum of both less the smaller one, in both halves, since these neither
// carry nor borrow in the end. Multiplications by numbers that the compiler does not know run beside comparisons: on an
// H200 2 of 3 exchanges by sums are 1.3 times as fast as none, if the code fits the cache of instructions.
__constant__ unsigned FACTOR[3] = {1u, ~0u, 1u << 16};
template <typename Key>
__device__ inline void exchange_by_sum(Key& a, Key& b) {
    const unsigned sum = a.bits * FACTOR[0] + b.bits;
    a = low(a, b);
    b = {a.bits * FACTOR[1] + sum};
}

// Sorts three keys: sm_90 compares three at once, and the middle one is the sum less the others.
template <typename Key>
__device__ inline void exchange(Key& a, Key& b, Key& c) {
    const Key least = low(low(a, b), c), most = high(high(a, b), c);
    b = {a.bits + b.bits + c.bits - least.bits - most.bits};
    a = least;
    c = most;
}

// A merge of A and B ascending keys in places 0 ... A + B - 1, of which those of the ranks FROM ... FROM + KEPT - 1 are wanted,
// as a table: Batcher's odd-even merge, or a bitonic one of these alone if it takes fewer comparisons.
template <int A, int B, int FROM, int KEPT, int SUMS>
struct Merging {
    static constexpr int MOST = 8 * (A + B);
    int count = 0, comparisons = 0;  // exchanges; two comparisons each, or one if one end is not used
    unsigned char lower[MOST] = {}, upper[MOST] = {}, ranked[A + B] = {};  // places
    bool by_sum[MOST] = {};

    constexpr Merging() {
        merge(0, A, A, B, 1, ranked);
        mark();
        constexpr int SIZE = power_of_two(1), BELOW = FROM - (SIZE - KEPT) / 2, ABOVE = A + B - SIZE - BELOW;
        if constexpr (BELOW >= 0 && ABOVE >= 0 && BELOW <= B && ABOVE <= B && BELOW + ABOVE <= A) {
            const Merging other(BELOW, ABOVE);
            if (other.comparisons < comparisons) *this = other;
        }
    }
    // Bitonic, without the `least` smallest and the `most` largest keys. The `least` smallest keys of A, in order, are compared
    // with those of B in reverse order: the smaller keys of these pairs are the smallest of all. Likewise the largest keys. The
    // keys that are left, of A in order and then of B in reverse order, rise and fall once in a circle, so half-cleaners sort
    // them.
    constexpr Merging(int least, int most) {
        for (int i = 0; i < least; ++i) exchange(i, A + least - 1 - i);
        for (int i = 0; i < most; ++i) exchange(A + B - 1 - i, A - most + i);
        unsigned char* const order = ranked + least;
        const int size = A + B - least - most, of_a = A - least - most;
        for (int i = 0; i < size; ++i) order[i] = static_cast<unsigned char>(i < of_a ? least + i : A + size - 1 - i);
        for (int apart = size / 2; apart >= 1; apart /= 2)
            for (int i = 0; i < size; ++i)
                if ((i & apart) == 0) exchange(order[i], order[i + apart]);
        mark();
    }
    static constexpr int power_of_two(int size) { return size < KEPT ? power_of_two(2 * size) : size; }
    // Counts comparisons, and chooses the exchanges by sums.
    constexpr void mark() {
        bool used[A + B] = {};
        for (int i = FROM; i < FROM + KEPT; ++i) used[ranked[i]] = true;
        for (int e = count - 1, n = 0; e >= 0; --e) {
            bool &a = used[lower[e]], &b = used[upper[e]];
            by_sum[e] = a && b && n++ % 6 < SUMS;
            comparisons += a + b;
            a = b = a || b;
        }
    }
    // Keys of the places a, a + step, ... and b, b + step, ...; gives their places in order.
    constexpr void merge(int a, int count_a, int b, int count_b, int step, unsigned char* order) {
        if (count_a + count_b == 2 && count_a == 1) exchange(a, b);
        if (count_a <= 1 && count_b <= 1) {
            if (count_a == 1) *order++ = static_cast<unsigned char>(a);
            if (count_b == 1) *order++ = static_cast<unsigned char>(b);
            return;
        }
        unsigned char even[A + B] = {}, odd[A + B] = {};
        const int odds = count_a / 2 + count_b / 2, evens = count_a + count_b - odds;
        merge(a, count_a - count_a / 2, b, count_b - count_b / 2, 2 * step, even);
        merge(a + step, count_a / 2, b + step, count_b / 2, 2 * step, odd);
        *order++ = even[0];
        for (int i = 0; i < odds || i + 1 < evens; ++i) {
            if (i < odds && i + 1 < evens) exchange(odd[i], even[i + 1]);
            if (i < odds) *order++ = odd[i];
            if (i + 1 < evens) *order++ = even[i + 1];
        }
    }
    constexpr void exchange(int i, int j) {
        lower[count] = static_cast<unsigned char>(i);
        upper[count++] = static_cast<unsigned char>(j);
    }
};

// Merges two ascending arrays, of any lengths, and keeps the places FROM ... FROM + KEPT - 1.
template <int FROM, int KEPT, int A, int B, typename Key>
__device__ inline void merge(const Key (&a)[A], const Key (&b)[B], Key (&kept)[KEPT]) {
    static_assert(FROM >= 0 && FROM + KEPT <= A + B, "");
    constexpr Merging<A, B, FROM, KEPT, sums_of<Key>> network;
    Key x[A + B];
#pragma unroll
    for (int i = 0; i < A; ++i) x[i] = a[i];
#pragma unroll
    for (int i = 0; i < B; ++i) x[A + i] = b[i];
#pragma unroll
    for (int e = 0; e < network.count; ++e) {
        if (network.by_sum[e]) exchange_by_sum(x[network.lower[e]], x[network.upper[e]]);
        else exchange(x[network.lower[e]], x[network.upper[e]]);
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = x[network.ranked[FROM + i]];
}

// Sorts, ascending.
template <int N, typename Key>
__device__ inline void sort(Key (&x)[N]) {
    if constexpr (N == 3) {
        exchange(x[0], x[1], x[2]);
    } else if constexpr (N > 1) {
        Key a[N / 2], b[N - N / 2];
#pragma unroll
        for (int i = 0; i < N; ++i) (i < N / 2 ? a[i] : b[i - N / 2]) = x[i];
        sort(a);
        sort(b);
        merge<0, N>(a, b, x);
    }
}

// Merges three ascending arrays of three.
template <typename Key>
__device__ inline void merge(const Key (&a)[3], const Key (&b)[3], const Key (&c)[3], Key (&x)[9]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        x[3 * i] = a[i], x[3 * i + 1] = b[i], x[3 * i + 2] = c[i];
        exchange(x[3 * i], x[3 * i + 1], x[3 * i + 2]);
    }
    exchange(x[2], x[4], x[6]);
    exchange(x[1], x[2], x[3]);
    exchange(x[5], x[6], x[7]);
}

// The sample of a rank, from 0, among those of two ascending arrays: of all ways to take RANK + 1 from the front of both,
// the one whose last is smallest.
template <int RANK, int A, int B, typename Key>
__device__ inline Key ranked_of(const Key (&a)[A], const Key (&b)[B]) {
    static_assert(RANK >= 0 && RANK < A + B, "");
    constexpr int LEAST = RANK + 1 > B ? RANK + 1 - B : 0, MOST = RANK + 1 < A ? RANK + 1 : A;
    Key found;
#pragma unroll
    for (int i = LEAST; i <= MOST; ++i) {
        const int j = RANK + 1 - i;
        const Key last = i == 0 ? b[j - 1] : j == 0 ? a[i - 1] : high(a[i == 0 ? 0 : i - 1], b[j == 0 ? 0 : j - 1]);
        found = i == LEAST ? last : low(found, last);
    }
    return found;
}
