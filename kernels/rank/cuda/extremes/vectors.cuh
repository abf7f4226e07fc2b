// Vectors of 16 bytes and their minima and maxima: of samples beside each other, of windows within a vector or two, and of
// vectors at any address. Part of rank.cu.
#pragma once

#include "cuda/extremes/words.cuh"

template <typename Sample>
struct __align__(16) Vector {
    static constexpr int WORDS = 16 / sizeof(Word<Sample>), SAMPLES = 16 / sizeof(Sample);
    Word<Sample> word[WORDS];
};

// A vector as it is compared: bytes as two streams of words, of odd and of even places, each of which decides by the upper
// bytes of its halves.
template <typename Sample>
struct Lanes {
    static constexpr int STREAMS = sizeof(Sample) == 1 ? 2 : 1;
    Word<Sample> word[STREAMS][Vector<Sample>::WORDS];
};

template <typename Sample>
__device__ inline Lanes<Sample> widened(const Vector<Sample>& vector) {
    Lanes<Sample> lanes;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        lanes.word[0][k] = vector.word[k];
        if constexpr (sizeof(Sample) == 1) lanes.word[1][k] = vector.word[k] << 8;
    }
    return lanes;
}

template <typename Sample>
__device__ inline Vector<Sample> narrowed(const Lanes<Sample>& lanes) {
    Vector<Sample> vector;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (sizeof(Sample) == 1) vector.word[k] = __byte_perm(lanes.word[0][k], lanes.word[1][k], 0x3715);
        else vector.word[k] = lanes.word[0][k];
    }
    return vector;
}

template <bool LEAST>
__device__ inline unsigned extreme_halves(unsigned a, unsigned b) {
    return LEAST ? __vminu2(a, b) : __vmaxu2(a, b);
}

// Of words of a stream.
template <bool LEAST, typename Sample>
__device__ inline Word<Sample> extreme_in(Word<Sample> a, Word<Sample> b) {
    if constexpr (sizeof(Sample) == 1) return extreme_halves<LEAST>(a, b);
    else return extreme<Sample, LEAST>(a, b);
}

template <bool LEAST, typename Sample>
__device__ inline Lanes<Sample> extreme(const Lanes<Sample>& a, const Lanes<Sample>& b) {
    Lanes<Sample> found;
#pragma unroll
    for (int s = 0; s < Lanes<Sample>::STREAMS; ++s)
#pragma unroll
        for (int k = 0; k < Vector<Sample>::WORDS; ++k)
            found.word[s][k] = extreme_in<LEAST, Sample>(a.word[s][k], b.word[s][k]);
    return found;
}

template <bool LEAST, typename Sample>
__device__ inline Vector<Sample> extreme(const Vector<Sample>& a, const Vector<Sample>& b) {
    return narrowed(extreme<LEAST>(widened(a), widened(b)));
}

// The word that loses every comparison.
template <typename Sample, bool LEAST>
__device__ inline Word<Sample> neutral() {
    if constexpr (same<Sample, short>) return LEAST ? 0x7FFF7FFFu : 0x80008000u;
    else return LEAST ? ~Word<Sample>(0) : 0;
}

template <int N>
struct Number {
    static constexpr int value = N;
};

// The words that begin `by` samples after x, fewer than a vector has. `by` is the same for all threads.
template <typename Sample, int N, int M>
__device__ inline void shift(const Word<Sample> (&x)[N], int by, Word<Sample> (&found)[M]) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    static_assert(N - M >= Vector<Sample>::WORDS, "");
    const int bits = by % EACH * 8 * static_cast<int>(sizeof(Sample));
    const auto take = [&](auto words) {
#pragma unroll
        for (int k = 0; k < M; ++k) {
            const int at = k + words.value;
            if constexpr (EACH == 1) found[k] = x[at];
            else found[k] = __funnelshift_r(x[at], x[at + 1 < N ? at + 1 : at], bits);
        }
    };
    switch (by / EACH) {
        case 0: return take(Number<0>());
        case 1: return take(Number<1>());
        case 2: return take(Number<Vector<Sample>::WORDS == 2 ? 1 : 2>());
        default: return take(Number<Vector<Sample>::WORDS == 2 ? 1 : 3>());
    }
}

template <typename Sample>
__device__ inline Vector<Sample> shifted(const Vector<Sample>& a, const Vector<Sample>& b, int by) {
    constexpr int WORDS = Vector<Sample>::WORDS;
    Word<Sample> x[2 * WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; ++k) x[k] = a.word[k], x[WORDS + k] = b.word[k];
    Vector<Sample> found;
    shift<Sample>(x, by, found.word);
    return found;
}

// Of each sample of a vector, the extreme of it and those after it; with FORWARDS, of it and those before it.
template <bool LEAST, bool FORWARDS, typename Sample>
__device__ inline Vector<Sample> scanned(const Vector<Sample>& vector) {
    constexpr int WORDS = Vector<Sample>::WORDS, EACH = SAMPLES_A_WORD<Sample>;
    constexpr int FIRST = FORWARDS ? 0 : WORDS - 1, ON = FORWARDS ? 1 : -1;
    const Word<Sample> none = neutral<Sample, LEAST>();
    if constexpr (EACH == 4) {
        // Chains of each byte's place; `both` of neighbouring bytes; then the words to the side.
        Lanes<Sample> chain = widened(vector), found;
        unsigned before = none;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int k = FIRST + i * ON;
            if (i > 0) {
                chain.word[0][k] = extreme_halves<LEAST>(chain.word[0][k], chain.word[0][k - ON]);
                chain.word[1][k] = extreme_halves<LEAST>(chain.word[1][k], chain.word[1][k - ON]);
            }
            const unsigned both = extreme_halves<LEAST>(chain.word[0][k], chain.word[1][k]);
            const unsigned aside = FORWARDS ? __byte_perm(before, both, 0x5432) : __byte_perm(both, before, 0x5432);
            const unsigned near = extreme_halves<LEAST>(both, aside);
            const unsigned far = extreme_halves<LEAST>(aside, before);
            found.word[0][k] = FORWARDS ? near : extreme_halves<LEAST>(chain.word[0][k], far);
            found.word[1][k] = FORWARDS ? extreme_halves<LEAST>(chain.word[1][k], far) : near;
            before = both;
        }
        return narrowed(found);
    } else {
        Vector<Sample> found = vector;
        Word<Sample> before = none;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int k = FIRST + i * ON;
            const Word<Sample> chain = i == 0 ? vector.word[k] : extreme<Sample, LEAST>(vector.word[k], before);
            if constexpr (EACH == 1) {
                found.word[k] = chain;
            } else {
                const unsigned aside = FORWARDS ? __byte_perm(before, chain, 0x5432) : __byte_perm(chain, before, 0x5432);
                found.word[k] = extreme<Sample, LEAST>(chain, aside);
            }
            before = chain;
        }
        return found;
    }
}

template <bool LEAST, typename Sample>
__device__ inline Vector<Sample> extreme3(const Vector<Sample>& a, const Vector<Sample>& b, const Vector<Sample>& c) {
    return narrowed(extreme<LEAST>(extreme<LEAST>(widened(a), widened(b)), widened(c)));
}

// The first sample of a word in all its places.
template <typename Sample>
__device__ inline Word<Sample> first_of(Word<Sample> word) {
    if constexpr (SAMPLES_A_WORD<Sample> == 4) return __byte_perm(word, 0, 0x0000);
    else if constexpr (SAMPLES_A_WORD<Sample> == 2) return __byte_perm(word, 0, 0x1010);
    else return word;
}

template <typename Sample>
__device__ inline Vector<Sample> splat(Word<Sample> word) {
    Vector<Sample> vector;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) vector.word[k] = word;
    return vector;
}

// One step of doubling over words: x[i] = the extreme of x[i] and what is BY samples after it.
template <int BY, bool LEAST, typename Sample, int N>
__device__ inline void doubled(Word<Sample> (&x)[N]) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if constexpr (BY >= EACH) {
            if (k + BY / EACH < N) x[k] = extreme<Sample, LEAST>(x[k], x[k + BY / EACH]);
        } else {
            const Word<Sample> next = x[k + 1 < N ? k + 1 : k];
            x[k] = extreme<Sample, LEAST>(x[k], __byte_perm(x[k], next, EACH == 2 || BY == 2 ? 0x5432 : 0x4321));
        }
    }
}

// The extremes of windows of `taps` samples that begin at the first vector of x and end in its last.
template <bool LEAST, typename Sample, int N>
__device__ inline Vector<Sample> of_short(Word<Sample> (&x)[N], int taps) {
    constexpr int SAMPLES = Vector<Sample>::SAMPLES;
    int span = 1;
    if (taps >= 2) doubled<1, LEAST, Sample>(x), span = 2;
    if constexpr (SAMPLES >= 4)
        if (taps >= 4) doubled<2, LEAST, Sample>(x), span = 4;
    if constexpr (SAMPLES >= 8)
        if (taps >= 8) doubled<4, LEAST, Sample>(x), span = 8;
    if constexpr (SAMPLES >= 16)
        if (taps >= 16) doubled<8, LEAST, Sample>(x), span = 16;
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) found.word[k] = x[k];
    Vector<Sample> last;
    shift<Sample>(x, taps - span, last.word);
    return extreme<LEAST>(found, last);
}

template <typename Sample>
__device__ inline Vector<Sample> loaded_vector(const Sample* at) {
    Vector<Sample> found;
    if constexpr (sizeof(Word<Sample>) == 8) {
        const ulonglong2 both = __ldg(reinterpret_cast<const ulonglong2*>(at));
        found.word[0] = both.x, found.word[1] = both.y;
    } else {
        const uint4 all = __ldg(reinterpret_cast<const uint4*>(at));
        found.word[0] = all.x, found.word[1] = all.y, found.word[2] = all.z, found.word[3] = all.w;
    }
    return found;
}

// The vector at any address of a sample: of both vectors that hold a part of it if samples follow, or word by word.
template <typename Sample>
__device__ inline Vector<Sample> vector_at(const Sample* at, bool more_follow) {
    const int past = static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Sample));
    if (past == 0) return loaded_vector(at);
    if (more_follow) return shifted(loaded_vector(at - past), loaded_vector(at - past + Vector<Sample>::SAMPLES), past);
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) found.word[k] = word_at(at + k * SAMPLES_A_WORD<Sample>, k + 1 < Vector<Sample>::WORDS);
    return found;
}

// As one store: of an assignment of all words the compiler makes one for each, with 16 bytes between those of two threads.
template <typename Sample>
__device__ inline void store_vector(Sample* at, const Vector<Sample>& found) {
    if constexpr (sizeof(Word<Sample>) == 8) {
        __stcs(reinterpret_cast<ulonglong2*>(at), ulonglong2{found.word[0], found.word[1]});
    } else {
        __stcs(reinterpret_cast<uint4*>(at), uint4{found.word[0], found.word[1], found.word[2], found.word[3]});
    }
}
