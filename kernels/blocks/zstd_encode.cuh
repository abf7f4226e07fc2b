// Zstandard frames, encoded by a warp each.
//
// Contract: a stream of `source_bytes` becomes a frame that decodes to it, the same in every run, and `target_bytes` the
// frame's bytes; if these would not be fewer, `target_bytes` become the stream's and the target is undefined. Nothing beyond
// `source_bytes` of the target is written. The frame has its content's size, no checksum and no dictionary.
//
// Algorithm: blocks of at most PART bytes. Matches are found as for LZ4 (lz4.cuh). Literals: their counts give Huffman codes
// of at most 11 bits (in place from sorted counts, Moffat and Katajainen 1995; codes that are too long are shortened on
// account of shorter ones), and four streams are written one after another, each lane eight literals at once. Sequences: a
// lane for each of the three state machines, over 32 sequences at a time, whose bits 32 lanes write. A block with few
// sequences has the format's own tables, others have theirs. A block that does not shrink is stored.
// Source: RFC 8878; its tables are built as by libzstd, but none of a block has symbols of less than one state.
//
// Floor on an H200: a stream is read once and its frame written once, 4.2 TB/s. The search is the limit: of 1.5 million cycles
// for a stream of 32 KiB it takes 1.1, sequences 0.25, literals 0.04 (means of 768 streams of noisy u16). Measured, GB/s of
// samples: 24 MiB of noisy u16 as Blosc stores them 16 (LZ4: 28), 63 MiB 29 (46), 24 MiB of a smooth image 9.6 (17).
// If the search asked for eight equal bytes where shorter matches hardly pay, it took 0.95 to 1 times as long.
#pragma once

#include "zstd_tables.cuh"

namespace to_zstd {

// Bytes and sequences of a block, at most; find_matches may add SPARE sequences to a full one.
constexpr unsigned PART = 32 << 10, MOST_SEQUENCES = 2048, SPARE = 8;
// Of the memory for a stream: the block's literals, then its sequences.
constexpr unsigned SCRATCH = PART + 8 * (MOST_SEQUENCES + SPARE);
static_assert(SCRATCH == 49216, "as in cuda.py");
using zstd::ENCODED, zstd::MAGIC, zstd::RAW, zstd::RLE;
constexpr unsigned SIZE_OF_4_BYTES = 0xa0;
constexpr unsigned LONGEST_CODE = 11, WEIGHT_BITS = 6, MOST_DIRECT_WEIGHTS = 128, LEAST_HUFFMAN = 64;
// Of a table, bytes at most: 4 bits, and 10 of each count.
constexpr unsigned DESCRIPTION = 80;
// Fewer sequences than this have the format's own tables.
constexpr unsigned LEAST_TABLES = 72;

struct Shared {
    unsigned table[1 << HASH_BITS];
    Machine machines[ALPHABETS];
    unsigned counts[256], sorted[256];
    unsigned short codes[256];         // of a literal: the code, and its bits in the lowest four
    u8 order[256], description[256];   // literals by their counts
    unsigned per_length[32];
    unsigned staged[128];
};

// Calls `use` with each of `count` bytes, a lane each; several are on their way at once.
template <typename Source, typename Use>
__device__ void for_each(unsigned count, unsigned lane, Source from, Use use) {
    constexpr unsigned AT_ONCE = 4;
    for (unsigned i = lane; i < count; i += 32 * AT_ONCE) {
        u8 bytes[AT_ONCE];
        for (unsigned j = 0; j < AT_ONCE; ++j)
            if (i + 32 * j < count) bytes[j] = from(i + 32 * j);
        for (unsigned j = 0; j < AT_ONCE; ++j)
            if (i + 32 * j < count) use(i + 32 * j, bytes[j]);
    }
}

// Of base 2, in sixteenths, a line between powers of 2.
__device__ unsigned logarithm(unsigned value) { return 16 * top_bit(value) + (value * 16 >> top_bit(value)) - 16; }

// The bits of `total` symbols as their counts give them, in sixteenths; at most a hundredth too many.
__device__ unsigned entropy(const unsigned* counts, unsigned total, unsigned lane) {
    unsigned bits = 0;
    for (unsigned s = lane; s < 256; s += 32)
        if (counts[s] > 0) bits += counts[s] * (logarithm(total) - logarithm(counts[s]));
    for (unsigned by = 16; by > 0; by /= 2) bits += __shfl_xor_sync(ALL_LANES, bits, by);
    return bits;
}

// The frame, at most `room` bytes; what does not fit is counted, and not written.
struct Frame {
    u8* bytes;
    unsigned room, done, lane, pending;  // pending: bits in `staged`
    unsigned* staged;

    __device__ void write(unsigned at, u64 value, unsigned count) const {
        if (lane < count && at + lane < room) bytes[at + lane] = u8(value >> (8 * lane));
    }

    __device__ void put(u64 value, unsigned count) {
        write(done, value, count);
        done += count;
    }

    template <typename Source>
    __device__ void copy(unsigned count, Source from) {
        for_each(count, lane, from, [&](unsigned i, u8 byte) {
            if (done + i < room) bytes[done + i] = byte;
        });
        done += count;
    }

    __device__ void stage(unsigned at, u64 value, unsigned count) const {
        if (count == 0) return;
        unsigned shift = at % 32;
        atomicOr(staged + at / 32, unsigned(value << shift));
        if (shift + count > 32) atomicOr(staged + at / 32 + 1, unsigned(value >> (32 - shift)));
        if (shift + count > 64) atomicOr(staged + at / 32 + 2, unsigned(value >> (64 - shift)));
    }

    __device__ void begin_bits() {
        __syncwarp();
        for (unsigned i = lane; i < 128; i += 32) staged[i] = 0;
        pending = 0;
        __syncwarp();
    }

    // Appends two numbers of each lane, of at most 57 bits each.
    __device__ void put_bits(u64 first, unsigned first_count, u64 second, unsigned second_count) {
        unsigned count = first_count + second_count, sum = count;
        for (unsigned by = 1; by < 32; by *= 2) {
            unsigned other = __shfl_up_sync(ALL_LANES, sum, by);
            if (lane >= by) sum += other;
        }
        unsigned at = pending + sum - count;
        stage(at, first, first_count);
        stage(at + first_count, second, second_count);
        pending += __shfl_sync(ALL_LANES, sum, 31);
        __syncwarp();
        unsigned words = pending / 32, last = staged[words];
        copy(4 * words, [&](unsigned i) { return reinterpret_cast<const u8*>(staged)[i]; });
        __syncwarp();
        for (unsigned i = lane; i <= words; i += 32) staged[i] = i == 0 ? last : 0;
        pending %= 32;
        __syncwarp();
    }

    // Ends a stream of bits, which is read from a 1 at its end.
    __device__ void end_bits() {
        put_bits(1, lane == 0, 0, 0);
        put(staged[0], (pending + 7) / 8);
    }
};

// What is found in a block.
struct Found {
    u8* literals;
    uint2* sequences;  // literals, length << 16 | literals; offset as the format numbers it
    unsigned* counts;  // of the literals
    unsigned literal_count, sequence_count, lane;
    unsigned repeats[3];
    unsigned price;    // of a literal, sixteenths of a bit

    // Finds the price in some of a block's bytes.
    __device__ void set_price(const Plain& plain, unsigned begin, unsigned end) {
        constexpr unsigned EVERY = 31;
        unsigned total = (end - begin + EVERY - 1) / EVERY;
        for_each(total, lane, [&](unsigned i) { return plain.byte(begin + EVERY * i); },
                 [&](unsigned, u8 byte) { atomicAdd(counts + byte, 1u); });
        __syncwarp();
        price = max(entropy(counts, total, lane) / total, 1u);
        for (unsigned s = lane; s < 256; s += 32) counts[s] = 0;
        __syncwarp();
    }

    __device__ bool is_full() const { return sequence_count >= MOST_SEQUENCES; }

    // Whether a match takes about as few bits as its bytes as literals.
    __device__ bool pays(unsigned length, unsigned offset) const {
        return length * price >= 16 * (offset == repeats[0] ? 8 : top_bit(offset) + 12);
    }

    __device__ void put_literals(const Plain& plain, unsigned first, unsigned count) {
        for_each(count, lane, [&](unsigned i) { return plain.byte(first + i); }, [&](unsigned i, u8 byte) {
            literals[literal_count + i] = byte;
            atomicAdd(counts + byte, 1u);
        });
        literal_count += count;
    }

    __device__ void put_sequence(const Plain& plain, unsigned first, unsigned count, unsigned length, unsigned offset) {
        put_literals(plain, first, count);
        unsigned shift = count == 0, numbered = offset + 3, which = 3;
        for (unsigned i = shift; i < 3; ++i)
            if (which == 3 && offset == repeats[i]) which = i, numbered = i + 1 - shift;
        if (which > 1) repeats[2] = repeats[1];
        if (which > 0) repeats[1] = repeats[0], repeats[0] = offset;
        if (lane == 0) sequences[sequence_count] = make_uint2(length << 16 | count, numbered);
        ++sequence_count;
    }
};

// Sets the lengths of the codes, in `codes`; returns the longest. At least two symbols occur.
__device__ unsigned find_lengths(Shared& shared, unsigned lane) {
    unsigned symbols = 0;
    for (unsigned first = 0; first < 256; first += 32) {
        unsigned symbol = first + lane, count = shared.counts[symbol], rank = 0;
        symbols += __popc(__ballot_sync(ALL_LANES, count > 0));
        for (unsigned other = 0; other < 256; ++other) {
            unsigned theirs = shared.counts[other];
            rank += theirs > 0 && (theirs < count || (theirs == count && other < symbol));
        }
        shared.codes[symbol] = 0;
        if (count > 0) shared.order[rank] = u8(symbol), shared.sorted[rank] = count;
    }
    shared.per_length[lane] = 0;
    __syncwarp();
    unsigned longest = 0;
    if (lane == 0) {
        unsigned* sorted = shared.sorted;
        // Sums of pairs, with the index of its parent left behind for each.
        int last = symbols - 1, root = 0, leaf = 2;
        sorted[0] += sorted[1];
        for (int i = 1; i < last; ++i) {
            if (leaf > last || sorted[root] < sorted[leaf]) sorted[i] = sorted[root], sorted[root++] = i;
            else sorted[i] = sorted[leaf++];
            if (leaf > last || (root < i && sorted[root] < sorted[leaf])) sorted[i] += sorted[root], sorted[root++] = i;
            else sorted[i] += sorted[leaf++];
        }
        // Depths of the sums, then how many codes of each length.
        sorted[last - 1] = 0;
        for (int i = last - 2; i >= 0; --i) sorted[i] = sorted[sorted[i]] + 1;
        int free = 1, depth = 0;
        for (int i = last - 1; free > 0; ++depth) {
            int inner = 0;
            for (; i >= 0 && sorted[i] == depth; --i) ++inner;
            shared.per_length[min(depth, int(LONGEST_CODE))] += free - inner;
            free = 2 * inner;
        }
        unsigned sum = 0;
        for (unsigned i = 1; i <= LONGEST_CODE; ++i) sum += shared.per_length[i] << (LONGEST_CODE - i);
        for (; sum > 1u << LONGEST_CODE; --sum) {
            unsigned i = LONGEST_CODE - 1;
            while (shared.per_length[i] == 0) --i;
            --shared.per_length[LONGEST_CODE];
            --shared.per_length[i];
            shared.per_length[i + 1] += 2;
        }
        unsigned at = 0;
        for (unsigned i = LONGEST_CODE; i > 0; --i)
            for (unsigned n = 0; n < shared.per_length[i]; ++n) shared.codes[shared.order[at++]] = i, longest = max(longest, i);
    }
    __syncwarp();
    return __shfl_sync(ALL_LANES, longest, 0);
}

// Sets the codes, and writes how long each is. Returns the bytes of that, or 0 if it has no form. By one lane.
__device__ unsigned describe_codes(Shared& shared, unsigned longest) {
    unsigned first[LONGEST_CODE + 2] = {}, weights = 0;
    for (unsigned i = longest, at = 0; i > 0; --i) {
        first[i] = at;
        at = (at + shared.per_length[i]) / 2;
    }
    u8* weight = reinterpret_cast<u8*>(shared.sorted);
    for (unsigned s = 0; s < 256; ++s) {
        unsigned length = shared.codes[s];
        weight[s] = length == 0 ? 0 : u8(longest + 1 - length);
        if (length == 0) continue;
        shared.codes[s] = (unsigned short)(first[length]++ << 4 | length);
        weights = s;  // the last one's follows from the others
    }
    u8* bytes = shared.description;
    if (weights <= MOST_DIRECT_WEIGHTS) {
        bytes[0] = u8(127 + weights);
        if (weights % 2) weight[weights] = 0;
        for (unsigned i = 0; i < weights; i += 2) bytes[1 + i / 2] = weight[i] << 4 | weight[i + 1];
        return 1 + (weights + 1) / 2;
    }
    Machine& machine = shared.machines[0];
    constexpr unsigned WEIGHTS = LONGEST_CODE + 1;
    for (unsigned w = 0; w < WEIGHTS; ++w) machine.counts[w] = 0;
    for (unsigned i = 0; i < weights; ++i) ++machine.counts[weight[i]];
    for (unsigned w = 0; w < WEIGHTS; ++w)
        if (machine.counts[w] == weights) return 0;
    machine.bits = WEIGHT_BITS;
    machine.normalise(WEIGHTS, weights);
    machine.build(WEIGHTS);
    Bits head{bytes, 1, 0, 0};
    machine.describe(WEIGHTS, head);
    Bits out{bytes, head.close(), 0, 0};
    unsigned states[2];
    for (unsigned i = weights; i-- > 0;) {
        unsigned taken = machine.take(states[i % 2], weight[i], i + 2 >= weights);
        out.put(taken & 0xffff, taken >> 16);
    }
    for (unsigned i = 2; i-- > 0;) out.put(states[i] & ((1u << WEIGHT_BITS) - 1), WEIGHT_BITS);
    out.put(1, 1);
    unsigned used = out.close();
    bytes[0] = u8(used - 1);
    return used - 1 < 128 ? used : 0;
}

__device__ void put_literals(const Found& found, Frame& frame, Shared& shared, unsigned lane) {
    unsigned count = found.literal_count, kinds = 0, used = 0;
    for (unsigned s = lane; s < 256; s += 32) kinds += __popc(__ballot_sync(ALL_LANES, shared.counts[s] > 0));
    if (kinds == 1) {
        frame.put(RLE | 3 << 2 | count << 4, 3);
        frame.put(found.literals[0], 1);
        return;
    }
    unsigned most = count - count / 64;
    if (count >= LEAST_HUFFMAN && entropy(shared.counts, count, lane) / 128 < most) {
        unsigned longest = find_lengths(shared, lane), bits = 0;
        for (unsigned s = lane; s < 256; s += 32) bits += shared.counts[s] * shared.codes[s];
        for (unsigned by = 16; by > 0; by /= 2) bits += __shfl_xor_sync(ALL_LANES, bits, by);
        __syncwarp();
        if (lane == 0) used = describe_codes(shared, longest);
        used = __shfl_sync(ALL_LANES, used, 0);
        if (used > 0 && 5 + used + 6 + bits / 8 + 4 >= most) used = 0;
        __syncwarp();
    }
    if (used == 0 && found.sequence_count == 0) {
        frame.done += count;  // the block is stored
        return;
    }
    if (used == 0) {
        frame.put(RAW | 3 << 2 | count << 4, 3);
        frame.copy(count, [&](unsigned i) { return found.literals[i]; });
        return;
    }
    constexpr unsigned STREAMS = 4, AT_ONCE = 4;
    unsigned head = frame.done, quarter = (count + 3) / STREAMS, sizes[STREAMS];
    frame.done += 5;
    frame.copy(used, [&](unsigned i) { return shared.description[i]; });
    unsigned jumps = frame.done;
    frame.done += 6;
    for (unsigned stream = 0; stream < STREAMS; ++stream) {
        unsigned first = stream * quarter, left = min(quarter, count - first), begin = frame.done;
        frame.begin_bits();
        for (unsigned end = first + left; end > first; end -= min(end - first, 64 * AT_ONCE)) {
            u64 values[2] = {};
            unsigned bits[2] = {};
            for (unsigned i = 0; i < 2 * AT_ONCE; ++i) {
                unsigned behind = 2 * AT_ONCE * lane + i + 1;
                unsigned code = behind <= end - first ? shared.codes[found.literals[end - behind]] : 0;
                values[i / AT_ONCE] |= u64(code >> 4) << bits[i / AT_ONCE];
                bits[i / AT_ONCE] += code & 15;
            }
            frame.put_bits(values[0], bits[0], values[1], bits[1]);
        }
        frame.end_bits();
        sizes[stream] = frame.done - begin;
    }
    for (unsigned i = 0; i < STREAMS - 1; ++i) frame.write(jumps + 2 * i, sizes[i], 2);
    frame.write(head, u64(ENCODED | 3 << 2) | u64(count) << 4 | u64(frame.done - head - 5) << 22, 5);
}

// Counts the symbols of all sequences, and makes the tables: a lane each. Returns its mode.
__device__ unsigned make_table(const Found& found, Shared& shared, unsigned lane) {
    for (unsigned i = lane; i < ALPHABETS * MOST_SYMBOLS; i += 32) shared.machines[i / MOST_SYMBOLS].counts[i % MOST_SYMBOLS] = 0;
    __syncwarp();
    for (unsigned i = lane; i < found.sequence_count; i += 32) {
        uint2 sequence = found.sequences[i];
        atomicAdd(shared.machines[OFFSETS].counts + offset_code(sequence.y).symbol, 1);
        atomicAdd(shared.machines[MATCHES].counts + match_code((sequence.x >> 16) - 3).symbol, 1);
        atomicAdd(shared.machines[LITERALS].counts + literals_code(sequence.x & 0xffff).symbol, 1);
    }
    __syncwarp();
    if (lane >= ALPHABETS) return RAW;
    Machine& machine = shared.machines[lane];
    unsigned symbols = table_symbols[lane], count = found.sequence_count;
    Bits out{shared.description + DESCRIPTION * lane, 0, 0, 0};
    if (count < LEAST_TABLES) {
        for (unsigned s = 0; s < symbols; ++s) machine.counts[s] = known_counts[lane][s];
        machine.bits = known_bits[lane];
        machine.used = 0;
        machine.build(symbols);
        return RAW;
    }
    for (unsigned s = 0; s < symbols; ++s)
        if (machine.counts[s] == count) {
            machine.bits = 0;
            out.put(s, 8);
            machine.used = out.close();
            return RLE;
        }
    machine.bits = min(max(top_bit(count) - 1, 6u), unsigned(table_bits[lane]));
    machine.normalise(symbols, count);
    machine.describe(symbols, out);
    machine.used = out.close();
    machine.build(symbols);
    return ENCODED;
}

__device__ void put_sequences(const Found& found, Frame& frame, Shared& shared, unsigned lane) {
    unsigned count = found.sequence_count;
    if (count < 128) frame.put(count, 1);
    else frame.put((count >> 8) + 128 | (count & 255) << 8, 2);
    if (count == 0) return;
    unsigned mode = make_table(found, shared, lane), modes = 0;
    __syncwarp();
    for (unsigned i = 0; i < ALPHABETS; ++i) modes |= __shfl_sync(ALL_LANES, mode, i) << (6 - 2 * i);
    frame.put(modes, 1);
    for (unsigned i = 0; i < ALPHABETS; ++i)
        frame.copy(shared.machines[i].used, [&](unsigned j) { return shared.description[DESCRIPTION * i + j]; });
    frame.begin_bits();
    unsigned state = 0;
    for (unsigned done = 0; done < count; done += 32) {
        // The last sequence first: a lane's is `done + lane` before it.
        unsigned number = done + lane;
        uint2 sequence = number < count ? found.sequences[count - 1 - number] : make_uint2(3 << 16, 1);
        unsigned literals = sequence.x & 0xffff, more = (sequence.x >> 16) - 3;
        Code literal = literals_code(literals), match = match_code(more), offset = offset_code(sequence.y);
        unsigned symbols = literal.symbol | offset.symbol << 8 | match.symbol << 16, taken[ALPHABETS] = {};
        for (unsigned i = 0; i < min(32u, count - done); ++i) {
            unsigned theirs = __shfl_sync(ALL_LANES, symbols, i), bits = 0;
            if (lane < ALPHABETS) bits = shared.machines[lane].take(state, theirs >> (8 * lane) & 255, done + i == 0);
            for (unsigned j = 0; j < ALPHABETS; ++j) {
                unsigned their_bits = __shfl_sync(ALL_LANES, bits, j);
                if (lane == i) taken[j] = their_bits;
            }
        }
        u64 first = 0, second = 0;
        unsigned first_bits = 0, second_bits = 0;
        if (number < count) {
            for (unsigned i = 0; i < ALPHABETS; ++i) {
                unsigned bits = taken[(i + 1) % ALPHABETS];  // offsets, matches, literals
                first |= u64(bits & 0xffff) << first_bits;
                first_bits += bits >> 16;
            }
            first |= u64(literal.rest(literals)) << first_bits;
            first_bits += literal.bits;
            second = match.rest(more) | u64(offset.rest(sequence.y)) << match.bits;
            second_bits = match.bits + offset.bits;
        }
        frame.put_bits(first, first_bits, second, second_bits);
    }
    unsigned which = lane < ALPHABETS ? ALPHABETS - 1 - lane : 0;  // matches, offsets, literals
    unsigned last = __shfl_sync(ALL_LANES, state, which), bits = lane < ALPHABETS ? shared.machines[which].bits : 0;
    frame.put_bits(last & ((1u << bits) - 1), bits, 0, 0);
    frame.end_bits();
}

// Returns the bytes of the frame, or at least `room` if it does not shrink.
__device__ unsigned encode_frame(const Plain& plain, Frame frame, Shared& shared, u8* scratch, unsigned lane) {
    for (unsigned i = lane; i < 1u << HASH_BITS; i += 32) shared.table[i] = 0;
    frame.put(MAGIC | u64(SIZE_OF_4_BYTES) << 32, 5);
    frame.put(plain.nbytes, 4);
    Search search{};
    Found found{scratch, reinterpret_cast<uint2*>(scratch + PART), shared.counts, 0, 0, lane, {1, 4, 8}};
    for (unsigned begin = 0; begin < plain.nbytes && frame.done < frame.room;) {
        unsigned end = min(begin + PART, plain.nbytes), repeats[3], head = frame.done, type = ENCODED;
        for (unsigned i = 0; i < 3; ++i) repeats[i] = found.repeats[i];
        for (unsigned i = lane; i < 256; i += 32) shared.counts[i] = 0;
        found.literal_count = found.sequence_count = 0;
        __syncwarp();
        found.set_price(plain, begin, end);
        find_matches(plain, end, search, found, shared.table, lane);
        if (found.is_full()) end = search.literals;
        else {
            found.put_literals(plain, search.literals, end - search.literals);
            search.position = search.literals = end;
        }
        __syncwarp();
        frame.done += 3;
        put_literals(found, frame, shared, lane);
        put_sequences(found, frame, shared, lane);
        if (frame.done - head - 3 >= end - begin) {
            type = RAW;
            frame.done = head + 3;
            if (frame.done + end - begin >= frame.room) return frame.room;
            __syncwarp();  // other lanes may have written there
            for (unsigned i = 0; i < 3; ++i) found.repeats[i] = repeats[i];
            frame.copy(end - begin, [&](unsigned i) { return plain.byte(begin + i); });
        }
        frame.write(head, (end == plain.nbytes) | type << 1 | (frame.done - head - 3) << 3, 3);
        begin = end;
        __syncwarp();
    }
    return frame.done;
}

}  // namespace to_zstd

// scratch: SCRATCH bytes for each thread block
template <int = 0>
__global__ void __launch_bounds__(32) encode_zstd(Streams streams, unsigned count, u8* scratch) {
    __shared__ to_zstd::Shared shared;
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
        unsigned nbytes = unsigned(streams.source_bytes[i]), lane = threadIdx.x;
        Plain plain(reinterpret_cast<const u8*>(streams.sources[i]), nbytes);
        to_zstd::Frame frame{reinterpret_cast<u8*>(streams.targets[i]), nbytes, 0, lane, 0, shared.staged};
        unsigned encoded = to_zstd::encode_frame(plain, frame, shared, scratch + u64(blockIdx.x) * to_zstd::SCRATCH, lane);
        if (lane == 0) streams.target_bytes[i] = min(encoded, nbytes);
        __syncwarp();
    }
}
