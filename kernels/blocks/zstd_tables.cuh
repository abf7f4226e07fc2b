// Of Zstandard's sequences: the codes of numbers, and finite-state encoders with their tables. Source: RFC 8878.
#pragma once

#include "zstd_format.cuh"

namespace to_zstd {

using zstd::known_bits, zstd::known_counts, zstd::table_bits, zstd::table_symbols, zstd::MOST_SYMBOLS;

// The alphabets, and their lanes, in the order of their tables.
constexpr unsigned LITERALS = 0, OFFSETS = 1, MATCHES = 2, ALPHABETS = zstd::TABLES;

__device__ unsigned top_bit(unsigned value) { return 31 - __clz(value); }

// A number as its symbol and the bits that follow.
struct Code {
    unsigned symbol, bits;

    __device__ unsigned rest(unsigned value) const { return value & ((1u << bits) - 1); }
};

__device__ Code literals_code(unsigned count) {
    if (count >= 64) return {top_bit(count) + 19, top_bit(count)};
    if (count >= 48) return {24, 4};
    if (count >= 32) return {22 + (count - 32) / 8, 3};
    if (count >= 24) return {20 + (count - 24) / 4, 2};
    if (count >= 16) return {16 + (count - 16) / 2, 1};
    return {count, 0};
}

// `more`: a match's length less 3.
__device__ Code match_code(unsigned more) {
    if (more >= 128) return {top_bit(more) + 36, top_bit(more)};
    if (more >= 96) return {42, 5};
    if (more >= 64) return {40 + (more - 64) / 16, 4};
    if (more >= 48) return {38 + (more - 48) / 8, 3};
    if (more >= 40) return {36 + (more - 40) / 4, 2};
    if (more >= 32) return {32 + (more - 32) / 2, 1};
    return {more, 0};
}

// `offset`: as the format numbers it, 1 to 3 for a repeated one.
__device__ Code offset_code(unsigned offset) { return {top_bit(offset), top_bit(offset)}; }

// Bits that one lane writes, the first the lowest.
struct Bits {
    u8* bytes;
    unsigned done, used, held;

    __device__ void put(unsigned value, unsigned count) {
        held |= value << used;
        for (used += count; used >= 8; used -= 8, held >>= 8) bytes[done++] = u8(held);
    }

    __device__ unsigned close() {
        if (used > 0) bytes[done++] = u8(held);
        return done;
    }
};

// A finite-state encoder; everything is done by one lane. counts: of each symbol, then its states of 1 << bits: -1 if it
// has one, with all bits new.
struct Machine {
    unsigned bits, used;  // used: 0 if the table is the format's, else of what describes it
    int counts[MOST_SYMBOLS];
    unsigned added[MOST_SYMBOLS];
    int to[MOST_SYMBOLS];
    unsigned short next[512];
    u8 symbol[512];

    __device__ void normalise(unsigned symbols, unsigned total) {
        int left = 1 << bits, largest = 0, most = 0;
        for (int s = 0; s < symbols; ++s) {
            if (counts[s] == 0) continue;
            int share = max(1u, ((unsigned(counts[s]) << bits) + total / 2) / total);
            left -= share;
            counts[s] = share;
            if (share > most) most = share, largest = s;
        }
        for (; left < 0; ++left) {
            --counts[largest];
            for (int s = 0; s < symbols; ++s)
                if (counts[s] > counts[largest]) largest = s;
        }
        counts[largest] += left;
    }

    // Writes the counts.
    __device__ void describe(unsigned symbols, Bits& out) const {
        int left = (1 << bits) + 1, threshold = 1 << bits, width = bits + 1;
        out.put(bits - 5, 4);
        for (unsigned s = 0; s < symbols && left > 1;) {
            int count = counts[s++] + 1, most = 2 * threshold - 1 - left;
            left -= count - 1;
            if (count >= threshold) count += most;
            out.put(count, count < most ? width - 1 : width);
            for (; left < threshold && threshold > 1; threshold /= 2) --width;
            if (counts[s - 1] != 0) continue;
            unsigned zeros = 0;
            for (; s < symbols && counts[s] == 0; ++s) ++zeros;
            for (; zeros >= 3; zeros -= 3) out.put(3, 2);
            out.put(zeros, 2);
        }
    }

    __device__ void build(unsigned symbols) {
        unsigned size = 1u << bits, step = size / 2 + size / 8 + 3, high = size - 1, at = 0;
        int sum = 0;
        for (unsigned s = 0; s < symbols; ++s) {
            int count = counts[s] < 0 ? 1 : counts[s];
            if (counts[s] < 0) symbol[high--] = u8(s);
            unsigned most = count < 2 ? bits : bits - top_bit(count - 1);
            added[s] = (most << 16) - (unsigned(max(count, 1)) << most);
            to[s] = sum;
            sum += count;
        }
        for (unsigned s = 0; s < symbols; ++s)
            for (int i = 0; i < counts[s]; ++i) {
                symbol[at] = u8(s);
                do at = (at + step) & (size - 1);
                while (at > high);
            }
        for (unsigned u = 0; u < size; ++u) next[to[symbol[u]]++] = (unsigned short)(size + u);
        for (unsigned s = 0; s < symbols; ++s) to[s] -= 2 * abs(counts[s]);
    }

    // The bits that a symbol writes as low bits and, from 16 on, their number; none for the first.
    __device__ unsigned take(unsigned& state, unsigned s, bool is_first) const {
        if (bits == 0) return 0;
        unsigned count = (is_first ? added[s] + (1 << 15) : state + added[s]) >> 16;
        unsigned from = is_first ? (count << 16) - added[s] : state, low = from & ((1u << count) - 1);
        state = next[int(from >> count) + to[s]];
        return is_first ? 0 : count << 16 | low;
    }
};

}  // namespace to_zstd
