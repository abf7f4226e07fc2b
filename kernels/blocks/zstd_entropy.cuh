// Literals and sequences of a Zstandard block, decoded by a warp each; see zstd_decode.cuh.
//
// Literals have a Huffman code of at most TREE_BITS, and one stream or four, each decoded by a lane. Sequences have three codes
// of finite states. Both are read from their end to their begin: all lanes bring the words around a position to shared memory,
// then one lane a stream decodes a round of symbols from there. A load from global memory by that lane alone, even if it was
// needed only two words later, made each symbol wait: 250 cycles for a literal and 690 for a sequence on an H200.
// Source: RFC 8878, sections 3.1.1.3 and 4.
#pragma once

#include "zstd_format.cuh"

namespace zstd {

constexpr unsigned TREE_BITS = 11, MOST_WEIGHT = 12, WEIGHT_BITS = 6;
__constant__ unsigned short table_first[TABLES] = {0, 512, 768};
constexpr unsigned TABLES_SIZE = 1280;
// Of lengths from code 16 and 32 on: how many bits are added, and to what.
__constant__ unsigned char literal_bits[20] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ unsigned char match_bits[21] = {1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ unsigned literal_least[20] = {16,  18,  20,   22,   24,   28,   32,   40,    48,    64,
                                           128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
__constant__ unsigned match_least[21] = {35,  37,  39,  41,   43,   47,   51,   59,   67,    83,   99,
                                         131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};

// An entry of a table: the next state without its bits (16 bits), how many those are (8), how many are added to the value
// (8), and the least value (32).
constexpr unsigned STATE_BITS = 16, ADDED = 24, LEAST = 32;

// Bits from the end of some bytes to their begin, counted from their first aligned word. `at`: before which are the next;
// less than `begin` if more were taken than there are.
struct Backward {
    const unsigned* words;
    int at, begin;

    __device__ bool open(const u8* bytes, unsigned nbytes) {
        if (nbytes == 0 || bytes[nbytes - 1] == 0) return false;
        begin = int(8 * (reinterpret_cast<u64>(bytes) % 4));
        at = begin + int(8 * (nbytes - 1)) + 31 - __clz(bytes[nbytes - 1]);
        words = reinterpret_cast<const unsigned*>(bytes - begin / 8);
        return true;
    }

    __device__ unsigned word(int number) const { return number >= 0 ? words[number] : 0; }

    // The 64 bits before a position, of words that `get` gives by number.
    template <typename Get>
    static __device__ u64 bits(int at, Get get) {
        int number = at >> 5;
        unsigned high = get(number), middle = get(number - 1), low = get(number - 2);
        return u64(__funnelshift_r(middle, high, at & 31)) << 32 | __funnelshift_r(low, middle, at & 31);
    }
};

// Takes the highest bits.
template <typename T>
__device__ unsigned take(T& bits, unsigned count) {
    unsigned found = unsigned(bits >> 1 >> (8 * sizeof(T) - 1 - count));
    bits <<= count;
    return found;
}

// How often a table's states have each symbol; -1: once, with all bits of a state. False if they are damaged.
__device__ bool read_counts(Reader& in, unsigned most_bits, unsigned symbols, short* counts, unsigned& bits) {
    unsigned at = 0;
    auto peek = [&](unsigned width) {
        unsigned found = 0;
        for (unsigned i = 0; i < 3; ++i)
            if (in.at + at / 8 + i < in.end) found |= unsigned(in.at[at / 8 + i]) << (8 * i);
        return found >> at % 8 & ((1u << width) - 1);
    };
    bits = 5 + peek(4);
    at = 4;
    if (bits > most_bits) return false;
    int left = (1 << bits) + 1;
    unsigned symbol = 0;
    while (left > 1) {
        if (symbol >= symbols) return false;
        unsigned width = 31 - __clz(left), spare = (2u << width) - 1 - left, value = peek(width);
        at += width;
        if (value >= spare) {
            at -= width;
            value = peek(width + 1);
            at += width + 1;
            if (value >= 1u << width) value -= spare;
        }
        int count = int(value) - 1;
        left -= count < 0 ? 1 : count;
        counts[symbol++] = short(count);
        for (unsigned zeros = count == 0 ? 3 : 0; zeros == 3;) {
            zeros = peek(2);
            at += 2;
            if (zeros > symbols - symbol) return false;
            for (unsigned i = 0; i < zeros; ++i) counts[symbol++] = 0;
        }
    }
    while (symbol < symbols) counts[symbol++] = 0;
    return in.skip((at + 7) / 8), in.is_right;
}

// The least value of a code of a table, and the bits added to it; of others the code.
__device__ u64 value_of(unsigned table, unsigned code) {
    unsigned least = table == 2 ? code + 3 : code, added = 0;
    if (table == 1) least = 1u << code, added = code;
    if (table == 0 && code >= 16) least = literal_least[code - 16], added = literal_bits[code - 16];
    if (table == 2 && code >= 32) least = match_least[code - 32], added = match_bits[code - 32];
    return u64(least) << LEAST | added << ADDED;
}

// Spreads the symbols over the states of a table. Uses up the counts.
__device__ void make_table(u64* states, unsigned table, short* counts, unsigned symbols, unsigned bits) {
    unsigned size = 1u << bits, step = (size >> 1) + (size >> 3) + 3, high = size, at = 0;
    for (unsigned s = 0; s < symbols; ++s)
        if (counts[s] < 0) states[--high] = s;
    for (unsigned s = 0; s < symbols; ++s) {
        for (int i = 0; i < counts[s]; ++i) {
            states[at] = s;
            do at = (at + step) % size;
            while (at >= high);
        }
    }
    for (unsigned i = 0; i < size; ++i) {
        unsigned s = unsigned(states[i]), number = counts[s] < 0 ? 1 : counts[s], more = bits - (31 - __clz(number));
        counts[s] = short(number + 1);
        states[i] = value_of(table, s) | more << STATE_BITS | ((number << more) - size);
    }
}

// Weights of the tree's symbols; returns how many, or 0 if they are damaged. bits: the longest code.
__device__ unsigned read_weights(Reader& in, u8* weights, short* counts, u64* states, unsigned& bits) {
    unsigned head = unsigned(in.take(1)), count = 0;
    if (head >= 128) {
        const u8* from = in.skip((head - 127 + 1) / 2);
        if (!in.is_right) return 0;
        for (; count < head - 127; ++count) weights[count] = count % 2 ? from[count / 2] & 15 : from[count / 2] >> 4;
    } else {
        Reader part{in.at, in.at + head};
        Backward stream;
        unsigned state[2], log;
        in.skip(head);
        if (!in.is_right || !read_counts(part, WEIGHT_BITS, MOST_WEIGHT + 1, counts, log)) return 0;
        make_table(states, TABLES, counts, MOST_WEIGHT + 1, log);
        if (!stream.open(part.at, unsigned(part.end - part.at))) return 0;
        auto next = [&](unsigned bits) {
            u64 found = Backward::bits(stream.at, [&](int number) { return stream.word(number); });
            stream.at -= int(bits);
            return take(found, bits);
        };
        for (unsigned i = 0; i < 2; ++i) state[i] = next(log);
        if (stream.at < stream.begin) return 0;
        while (stream.at >= stream.begin) {
            if (count > 253) return 0;
            u64 entry = states[state[count % 2]];
            weights[count] = u8(entry >> LEAST);
            state[count++ % 2] = unsigned(entry & 0xffff) + next(entry >> STATE_BITS & 255);
        }
        weights[count] = u8(states[state[count % 2]] >> LEAST);
        ++count;
    }
    unsigned total = 0, least = 0;
    for (unsigned i = 0; i < count; ++i) {
        if (weights[i] > MOST_WEIGHT) return 0;
        total += 1u << weights[i] >> 1;
        least += weights[i] == 1;
    }
    bits = 32 - __clz(total);
    unsigned rest = (1u << bits) - total;
    if (total == 0 || bits > TREE_BITS || (rest & (rest - 1)) != 0) return 0;
    weights[count] = u8(32 - __clz(rest));
    least += rest == 1;
    return least < 2 || least % 2 ? 0 : count + 1;
}

// A tree's table has, for the next TREE_BITS or fewer, a symbol and how many bits it takes.
struct Tree {
    unsigned short *codes, *first;
    u8* weights;
    short* counts;
    u64* states;
    unsigned bits;

    __device__ bool make(Reader& in, unsigned lane) {
        unsigned count = 0;
        if (lane == 0) count = read_weights(in, weights, counts, states, bits);
        __syncwarp();
        count = __shfl_sync(ALL_LANES, count, 0);
        bits = __shfl_sync(ALL_LANES, bits, 0);
        in.at = reinterpret_cast<const u8*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(in.at), 0));
        if (count == 0) return false;
        unsigned before = 0, each = 1u << lane >> 1, mine = 0;  // this lane has the symbols of one weight
        for (unsigned s = 0; s < count; ++s) mine += weights[s] == lane ? each : 0;
        for (unsigned w = 1; w <= MOST_WEIGHT; ++w) {
            unsigned other = __shfl_sync(ALL_LANES, mine, w);
            if (w < lane) before += other;
        }
        for (unsigned s = 0; s < count; ++s)
            if (weights[s] == lane) first[s] = (unsigned short)(before), before += each;
        __syncwarp();
        for (unsigned s = 0; s < count; ++s) {
            unsigned weight = weights[s];
            if (weight == 0) continue;
            for (unsigned i = lane; i < 1u << weight >> 1; i += 32)
                codes[first[s] + i] = (unsigned short)(s << 8 | (bits + 1 - weight));
        }
        __syncwarp();
        return true;
    }
};

// Decodes the streams of the first lanes together. Shared memory has the words around each and what it decodes.
struct Streams4 {
    static constexpr unsigned STREAMS = 4, LANES = 8, HELD = 64, ROUND = 120, AT_ONCE = 5;
    unsigned (*words)[HELD];
    u8 (*symbols)[ROUND];

    __device__ bool decode(const Tree& tree, Backward in, u8* to, unsigned count, unsigned lane) {
        unsigned which = lane / LANES, first = lane % LANES, most = __shfl_sync(ALL_LANES, count, 0);
        Backward its{reinterpret_cast<const unsigned*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(in.words), which)), 0, 0};
        u8* its_to = reinterpret_cast<u8*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(to), which));
        unsigned its_count = __shfl_sync(ALL_LANES, count, which);
        for (unsigned done = 0; done < most; done += ROUND) {
            int top = __shfl_sync(ALL_LANES, in.at, which) >> 5;
            unsigned its_todo = its_count > done ? min(its_count - done, ROUND) : 0;
            for (unsigned i = first; i < HELD && its_todo > 0; i += LANES)
                words[which][(top - int(i)) & (HELD - 1)] = its.word(top - int(i));
            __syncwarp();
            unsigned todo = count > done ? min(count - done, ROUND) : 0;
            for (unsigned i = 0; i < todo; i += AT_ONCE) {
                u64 bits = Backward::bits(in.at, [&](int number) { return words[lane][number & (HELD - 1)]; });
                for (unsigned j = 0; j < AT_ONCE; ++j) {
                    unsigned entry = tree.codes[unsigned(bits >> 32) >> (32 - tree.bits)], taken = entry & 255;
                    symbols[lane][i + j] = u8(entry >> 8);
                    bits <<= taken;
                    if (i + j < todo) in.at -= int(taken);
                }
            }
            __syncwarp();
            for (unsigned i = first; i < its_todo; i += LANES) its_to[done + i] = symbols[which][i];
            __syncwarp();
        }
        return __all_sync(ALL_LANES, count == 0 || in.at == in.begin);
    }
};

__device__ bool decode_literals(const Scratch& scratch, const Part& p, Tree tree, Streams4 streams, unsigned lane) {
    u8* to = scratch.literals + p.literals;
    Reader in{p.source, p.source + p.bytes};
    LiteralsHeader head;
    head.read(in);
    if (head.type == RAW) return true;
    if (head.type == RLE) {
        for (unsigned i = lane; i < head.count; i += 32) to[i] = *head.data;
        return true;
    }
    const u8 *data = head.data, *end = data + head.bytes;
    Reader description{data, end};
    if (head.type == REPEATED) {
        const Part& other = scratch.parts[p.tree];
        LiteralsHeader its;
        description = {other.source, other.source + other.bytes};
        its.read(description);
        description = {its.data, its.data + its.bytes};
    }
    if (!tree.make(description, lane)) return false;
    if (head.type == ENCODED) data = description.at;
    unsigned all = unsigned(end - data), each = head.count, before = 0, mine = all;
    bool is_right = true;
    if (head.streams == Streams4::STREAMS) {
        Reader sizes{data, end};
        each = (head.count + 3) / 4, before = 6;
        for (unsigned i = 0; i < 3; ++i) {
            unsigned size = unsigned(sizes.take(2));
            if (i < lane) before += size;
            if (i == lane) mine = size;
        }
        is_right = sizes.is_right;
    }
    unsigned first = lane * each, count = lane < head.streams ? min(each, head.count - min(first, head.count)) : 0;
    Backward bits{};
    if (lane < head.streams) {
        if (head.streams > 1 && lane == 3) mine = all - before;
        is_right = is_right && before < all && mine <= all - before && bits.open(data + before, mine);
    }
    // an empty last stream has to end too
    if (lane < head.streams && count == 0) is_right = is_right && bits.at == bits.begin;
    return __all_sync(ALL_LANES, is_right) && streams.decode(tree, bits, to + first, count, lane);
}

// Makes the tables: lane t that of table t. Lane 3 finds the first byte after the block's own. False if they are damaged.
__device__ bool read_tables(const Part& p, u64* states, short* counts, unsigned& bits, const u8*& behind, unsigned lane) {
    Reader in{p.source, p.source + p.bytes};
    LiteralsHeader literals;
    SequencesHeader head;
    literals.read(in);
    head.read(in);
    unsigned last = min(lane, TABLES - 1);
    for (unsigned t = 0; t <= last; ++t) {
        unsigned mode = head.mode(t), symbols = table_symbols[t];
        bits = 0;
        if (mode == RAW) {
            bits = known_bits[t];
            for (unsigned s = 0; s < symbols; ++s) counts[s] = known_counts[t][s];
        } else if (mode == RLE) {
            unsigned symbol = unsigned(in.take(1));
            if (!in.is_right || symbol >= symbols) return false;
            for (unsigned s = 0; s < symbols; ++s) counts[s] = s == symbol;
        } else if (mode == ENCODED && !read_counts(in, table_bits[t], symbols, counts, bits)) {
            return false;
        }
    }
    behind = in.at;
    if (lane < TABLES) make_table(states + table_first[lane], lane, counts, table_symbols[lane], bits);
    return true;
}

// Sequences as they are decoded, one for each lane.
struct Found {
    unsigned offset[32], literals[32], length[32];
};

// The output and literals before a sequence, and the offsets that it may repeat.
struct Progress {
    unsigned output = 0, literals = 0, repeats[3] = {OF_EARLIER, OF_EARLIER | 1 << WHICH, OF_EARLIER | 2 << WHICH};

    // What a lane's sequence is stored as, after all sequences of lanes before it. False if an offset is not allowed.
    __device__ bool add(const Found& found, unsigned count, unsigned lane, u64& stored) {
        bool is_mine = lane < count, is_right = true;
        unsigned mine = is_mine ? found.literals[lane] : 0, bytes = is_mine ? mine + found.length[lane] : 0, literals_to = mine;
        unsigned offset = is_mine ? found.offset[lane] : 0, which = offset > 3 ? 4 : is_mine ? offset - (mine > 0) : 0;
        // The offsets to repeat after it, of those before it.
        unsigned after[3] = {offset - 3, which == 0 ? repeats_of(1) : repeats_of(0), repeats_of(which < 2 ? 2 : 1)};
        if (which < 4) after[0] = which < 3 ? repeats_of(which) : repeats_of(0) + 1;
        else is_right = after[0] < OF_EARLIER;
        unsigned to = bytes;
        for (unsigned by = 1; by < 32; by *= 2) {
            unsigned before[3], more_bytes = __shfl_up_sync(ALL_LANES, to, by);
            unsigned more_literals = __shfl_up_sync(ALL_LANES, literals_to, by);
            for (unsigned i = 0; i < 3; ++i) before[i] = __shfl_up_sync(ALL_LANES, after[i], by);
            if (lane < by) continue;
            to += more_bytes, literals_to += more_literals;
            for (unsigned i = 0; i < 3; ++i) after[i] = offset_of(after[i], before);
        }
        for (unsigned i = 0; i < 3; ++i) after[i] = offset_of(after[i], repeats);
        stored = u64(output + to - bytes) << AT_OUTPUT | u64(literals + literals_to - mine) << AT_LITERALS | after[0];
        output += __shfl_sync(ALL_LANES, to, 31);
        literals += __shfl_sync(ALL_LANES, literals_to, 31);
        for (unsigned i = 0; i < 3; ++i) repeats[i] = __shfl_sync(ALL_LANES, after[i], 31);
        return __all_sync(ALL_LANES, is_right && after[0] > 0) && output <= LONGEST_BLOCK;
    }

    static __device__ unsigned repeats_of(unsigned which) { return OF_EARLIER | which << WHICH; }
};

__device__ bool decode_sequences(
    const Scratch& scratch, Part& p, u64* states, short* counts, unsigned* words, Found& found, unsigned lane
) {
    if (p.sequence_count == 0) {
        if (lane == 0) p.decoded = p.literal_count;
        if (lane < 3) p.repeats[lane] = Progress::repeats_of(lane);
        return true;
    }
    unsigned bits = 0;
    const u8* behind = nullptr;
    bool is_right = true;
    if (lane <= TABLES) {
        const Part& from = lane < TABLES ? scratch.parts[p.tables[lane]] : p;
        is_right = read_tables(from, states, counts + lane * MOST_SYMBOLS, bits, behind, lane);
    }
    if (!__all_sync(ALL_LANES, is_right)) return false;
    behind = reinterpret_cast<const u8*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(behind), TABLES));
    unsigned state[TABLES];
    for (unsigned t = 0; t < TABLES; ++t) state[t] = __shfl_sync(ALL_LANES, bits, t);
    Backward in;
    if (!in.open(behind, unsigned(p.source + p.bytes - behind))) return false;
    constexpr unsigned HELD = 128, ROUND = 32;
    auto get = [&](int number) { return words[number & (HELD - 1)]; };
    Progress progress;
    unsigned sequences = p.sequence_count, literals = p.literal_count;
    u64* target = scratch.sequences + p.sequences;
    for (unsigned done = 0; done < sequences; done += ROUND) {
        int top = __shfl_sync(ALL_LANES, in.at, 0) >> 5;
        for (unsigned i = lane; i < HELD; i += 32) words[(top - int(i)) & (HELD - 1)] = in.word(top - int(i));
        __syncwarp();
        unsigned todo = min(sequences - done, ROUND);
        if (done == 0 && lane == 0) {
            u64 first = Backward::bits(in.at, get);
            for (unsigned t = 0; t < TABLES; ++t) in.at -= int(state[t]), state[t] = take(first, state[t]);
        }
        for (unsigned i = 0; i < todo && lane == 0; ++i) {
            u64 literal = states[state[0]], distance = states[512 + state[1]], match = states[768 + state[2]];
            unsigned more_offset = distance >> ADDED & 255, more_match = match >> ADDED & 255, more = literal >> ADDED & 255;
            u64 values = Backward::bits(in.at, get);
            in.at -= int(more_offset + more_match + more);
            found.offset[i] = unsigned(distance >> LEAST) + take(values, more_offset);
            found.length[i] = unsigned(match >> LEAST) + take(values, more_match);
            found.literals[i] = unsigned(literal >> LEAST) + take(values, more);
            if (done + i + 1 == sequences) break;  // no states follow
            unsigned next = unsigned(Backward::bits(in.at, get) >> 32), count[TABLES] = {
                unsigned(literal) >> STATE_BITS & 255, unsigned(distance) >> STATE_BITS & 255, unsigned(match) >> STATE_BITS & 255};
            in.at -= int(count[0] + count[1] + count[2]);
            state[0] = unsigned(literal & 0xffff) + take(next, count[0]);
            state[2] = unsigned(match & 0xffff) + take(next, count[2]);
            state[1] = unsigned(distance & 0xffff) + take(next, count[1]);
        }
        __syncwarp();
        u64 stored;
        if (!progress.add(found, todo, lane, stored) || progress.literals > literals) return false;
        if (lane < todo) target[done + lane] = stored;
    }
    if (lane > 0) return true;
    target[sequences] = u64(progress.output) << AT_OUTPUT | u64(progress.literals) << AT_LITERALS;
    for (unsigned i = 0; i < 3; ++i) p.repeats[i] = progress.repeats[i];
    p.decoded = progress.output + literals - progress.literals;
    return in.at == in.begin && p.decoded <= LONGEST_BLOCK;
}

}  // namespace zstd
