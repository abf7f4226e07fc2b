// zlib streams (deflate), decoded by a warp each.
//
// Contract: a stream of `source_bytes` decodes to exactly `target_bytes` with the checksum that follows it, or is refused:
// `fault` becomes the smallest index of a refused stream, and its bytes are undefined. Any bytes may be decoded: codes are
// built only of lengths that fill their tree, and every length, distance and position is compared with what is left of
// stream and output before it is used. Zeros follow a stream's last byte, no block can consist of them, and every symbol
// writes bytes or ends its block, so decoding ends. Refused is all that zlib refuses; also a code of literals with only one
// symbol, a preset dictionary, and streams above 64 MiB. Bytes after the checksum are ignored.
//
// Algorithm: all lanes follow the stream together. Its words are in the lanes' registers, and the next 64 bits in all. A
// table in shared memory gives one or two literals or a length for the next bits, another one a distance. For longer codes,
// lane n compares the next n bits with the codes of that length (canonical codes are consecutive). Lane i keeps the i-th
// literals or match of a batch; a full batch is copied at once, each lane its own, since the bytes that matches repeat
// mostly lie far before the batch (the noise of images has matches of 4 bytes, 4 KiB away). Matches that repeat bytes of the
// batch, or are long, follow one by one, each copied by all lanes. Lanes share the building of tables and the checksum too.
// Sources: RFC 1950 and 1951.
//
// Floor on an H200: a stream is read and its output written once, 4.2 TB/s. Symbols follow one another, each some 400 cycles
// after the one before, so the number of streams decides. Measured, GB/s of noisy u16 in tiles of 128 KiB: 64 streams 1.0,
// 384 5.4, 1,536 19, 4,096 25. Without batches, each match copied at once: 0.6, 3.4, 11.6, 20.
#pragma once

constexpr unsigned TABLE_BITS = 10, DISTANCE_BITS = 8, LONGEST_CODE = 15;
// Symbols: of literals and lengths, of distances; of these, the ones that a stream may use.
constexpr unsigned LITERALS = 288, DISTANCES = 32, USED_LITERALS = 286, USED_DISTANCES = 30;
constexpr unsigned END_OF_BLOCK = 256, NO_SYMBOL = 1u << 16;
// An entry of a table. Of a length or distance: bits of its code, how many bits follow that are added, and the least; the
// least length is 0 for the end of a block. Of literals: bits of all codes and of the first, one or two bytes, how many, and
// IS_LITERAL. Zero: a longer code, or none.
constexpr unsigned MORE = 4, VALUE = 8, COUNT = 24, IS_LITERAL = 1u << 31;

// A stream's bits. Positions count bytes from the start of its first aligned word, which may hold bytes of its neighbour.
struct Bits {
    const unsigned* words;
    unsigned begin, end, lane;
    unsigned next, coming;       // the number of the word that is taken next, and the word
    unsigned mine, ahead;        // this lane's words of the 32 around it, and of the 32 after these
    unsigned held;               // bits in the buffer
    u64 buffer;

    __device__ Bits(const u8* bytes, unsigned nbytes, unsigned lane) : lane(lane) {
        begin = reinterpret_cast<u64>(bytes) % 4;
        end = begin + nbytes;
        words = reinterpret_cast<const unsigned*>(bytes - begin);
        seek(begin);
    }

    __device__ unsigned word(unsigned at) const { return 4 * at < end ? words[at] : 0; }

    __device__ void seek(unsigned byte) {
        next = byte / 4;
        mine = word(next / 32 * 32 + lane);
        ahead = word(next / 32 * 32 + 32 + lane);
        buffer = held = 0;
        coming = __shfl_sync(ALL_LANES, mine, next % 32);
        refill();
        drop(byte % 4 * 8);
    }

    // Makes at least 32 bits readable.
    __device__ void refill() {
        if (held >= 32) return;
        buffer |= u64(coming) << held;
        held += 32;
        if (++next % 32 == 0) {
            mine = ahead;
            ahead = word(next + 32 + lane);
        }
        coming = __shfl_sync(ALL_LANES, mine, next % 32);  // needed only when these bits are used up
    }

    __device__ void drop(unsigned bits) {
        buffer >>= bits;
        held -= bits;
    }

    __device__ unsigned take(unsigned bits) {
        unsigned found = unsigned(buffer) & ((1u << bits) - 1);
        drop(bits);
        return found;
    }

    // Takes the bits of an entry that is a length or distance, and those added to it.
    __device__ unsigned value(unsigned entry) {
        unsigned bits = entry % 16, more = entry >> MORE & 15;
        unsigned found = unsigned(buffer >> bits) & ((1u << more) - 1);
        drop(bits + more);
        return (entry >> VALUE) + found;
    }

    // The byte with the next bit.
    __device__ unsigned position() const { return 4 * next - (held + 7) / 8; }
};

// A canonical code: this lane's are the codes of as many bits as its number.
struct Code {
    unsigned first, count, before;  // the smallest; how many; symbols of shorter codes

    // Sorts the symbols by their codes. Returns how much of the tree is left: 0 if it is full, negative if it overflows.
    __device__ int make(const unsigned* lengths, unsigned symbols, unsigned* sorted, unsigned lane) {
        count = 0;
        for (unsigned s = 0; s < symbols; ++s) count += lengths[s] == lane;
        if (lane == 0) count = 0;
        unsigned code = 0, total = 0;
        int left = 1 << LONGEST_CODE;
        for (unsigned length = 1; length <= LONGEST_CODE; ++length) {
            code *= 2;
            if (lane == length) first = code, before = total;
            unsigned here = __shfl_sync(ALL_LANES, count, length);
            code += here, total += here;
            left -= here << (LONGEST_CODE - length);
        }
        if (left >= 0 && count > 0)
            for (unsigned s = 0, at = before; s < symbols; ++s)
                if (lengths[s] == lane) sorted[at++] = s;
        __syncwarp();
        return left;
    }

    // Takes the next symbol; NO_SYMBOL if no code begins the next bits.
    __device__ unsigned symbol(Bits& in, const unsigned* sorted) const {
        unsigned bits = __brev(unsigned(in.buffer)) >> 1 >> (31 - in.lane);
        unsigned found = __ballot_sync(ALL_LANES, bits - first < count);
        if (found == 0) return NO_SYMBOL;
        unsigned length = __ffs(found) - 1;
        in.drop(length);
        return sorted[__shfl_sync(ALL_LANES, before + bits - first, length)];
    }
};

__device__ unsigned entry_of_literal(unsigned byte) { return IS_LITERAL | 1 << COUNT | byte << VALUE; }

// Of a symbol from END_OF_BLOCK on.
__device__ unsigned entry_of_length(unsigned symbol) {
    if (symbol == END_OF_BLOCK) return 0;
    unsigned number = symbol - END_OF_BLOCK - 1, more = number < 8 || number == 28 ? 0 : number / 4 - 1;
    return (number < 8 ? 3 + number : number == 28 ? 258 : 3 + ((4 + number % 4) << more)) << VALUE | more << MORE;
}

__device__ unsigned entry_of_distance(unsigned symbol) {
    unsigned more = symbol < 4 ? 0 : symbol / 2 - 1;
    return (symbol < 4 ? 1 + symbol : 1 + ((2 + symbol % 2) << more)) << VALUE | more << MORE;
}

// Fills a table for the next BITS; `entry_of` gives the entry of a symbol without its bits, or 0 if it is not allowed.
template <unsigned BITS, typename Entry>
__device__ void make_table(unsigned* table, const Code& code, const unsigned* sorted, unsigned lane, Entry entry_of) {
    unsigned limits[BITS + 1], shift = code.before - code.first;
    for (unsigned length = 1; length <= BITS; ++length)
        limits[length] = __shfl_sync(ALL_LANES, code.first + code.count, length) << (BITS - length);
    for (unsigned i = lane; i < 1u << BITS; i += 32) {
        unsigned bits = __brev(i) >> (32 - BITS), length = 1;
        for (unsigned each = 1; each <= BITS; ++each) length += bits >= limits[each];
        unsigned from = __shfl_sync(ALL_LANES, shift, length);
        table[i] = length <= BITS ? entry_of(sorted[(bits >> (BITS - length)) + from], length) : 0;
    }
    __syncwarp();
}

struct Codes {
    Code literals, distances;
    // Shared memory: tables, the first of which holds the lengths until then, and the symbols of both codes.
    unsigned *table, *near, *sorted;

    __device__ bool make(unsigned used_literals, unsigned used_distances, unsigned lane) {
        const unsigned* lengths = table;
        if (literals.make(lengths, used_literals, sorted, lane) != 0) return false;
        int left = distances.make(lengths + used_literals, used_distances, sorted + LITERALS, lane);
        unsigned total = __shfl_sync(ALL_LANES, distances.before + distances.count, LONGEST_CODE);
        // There may be no distances, or one of one bit.
        if (left != 0 && !(total == 0 || (total == 1 && left == 1 << (LONGEST_CODE - 1)))) return false;
        make_table<DISTANCE_BITS>(near, distances, sorted + LITERALS, lane, [](unsigned symbol, unsigned bits) {
            return symbol < USED_DISTANCES ? entry_of_distance(symbol) | bits : 0;
        });
        make_table<TABLE_BITS>(table, literals, sorted, lane, [](unsigned symbol, unsigned bits) {
            if (symbol < END_OF_BLOCK) return entry_of_literal(symbol) | bits << MORE | bits;
            return symbol < USED_LITERALS ? entry_of_length(symbol) | bits : 0;
        });
        join_literals(lane);
        return true;
    }

    // Two literals become one entry if the table has bits for both.
    __device__ void join_literals(unsigned lane) {
        for (unsigned i = lane; i < 1u << TABLE_BITS; i += 32) {
            unsigned entry = table[i], bits = entry % 16, second = table[i >> bits];
            unsigned both = bits + (second >> MORE) % 16;
            __syncwarp();  // of an entry, others read the first literal, which stays
            if (entry & second & IS_LITERAL && both <= TABLE_BITS)
                table[i] = IS_LITERAL | 2 << COUNT | (second >> VALUE & 255) << (VALUE + 8) | (entry & 255u << VALUE)
                    | bits << MORE | both;
            __syncwarp();
        }
    }
};

// Reads the lengths of a block's codes into the table; false if they are damaged.
__device__ bool read_lengths(Bits& in, Codes& codes, unsigned& literals, unsigned& distances) {
    constexpr unsigned LENGTHS = 19;
    in.refill();
    literals = 257 + in.take(5);
    distances = 1 + in.take(5);
    unsigned count = 4 + in.take(4), lane = in.lane, mine = 0;
    if (literals > USED_LITERALS || distances > USED_DISTANCES) return false;
    // Lengths of the code of lengths come in the order 16, 17, 18, 0, 8, 7, 9, 6, 10, 5, …
    unsigned place = lane >= 16 ? lane - 16 : lane >= 8 ? 2 * lane - 12 : lane > 0 ? 19 - 2 * lane : 3;
    for (unsigned i = 0; i < count; ++i) {
        in.refill();
        unsigned found = in.take(3);
        if (i == place) mine = found;
    }
    if (lane < LENGTHS) codes.table[lane] = mine;
    __syncwarp();
    Code code;
    if (code.make(codes.table, LENGTHS, codes.sorted, lane) != 0) return false;
    unsigned total = literals + distances, value = 0;
    for (unsigned at = 0; at < total;) {
        in.refill();
        unsigned symbol = code.symbol(in, codes.sorted), repeat = 1;
        if (symbol == NO_SYMBOL || (symbol == 16 && at == 0)) return false;
        if (symbol == 16) repeat = 3 + in.take(2);
        else value = symbol < 16 ? symbol : 0;
        if (symbol == 17) repeat = 3 + in.take(3);
        if (symbol == 18) repeat = 11 + in.take(7);
        if (repeat > total - at) return false;
        for (unsigned i = lane; i < repeat; i += 32) codes.table[at + i] = value;
        at += repeat;
    }
    __syncwarp();
    return codes.table[END_OF_BLOCK] != 0;
}

__device__ void fixed_lengths(unsigned* lengths, unsigned lane) {
    for (unsigned i = lane; i < LITERALS + DISTANCES; i += 32)
        lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : i < LITERALS ? 8 : 5;
    __syncwarp();
}

// Up to 32 literals and matches that are still to be written, a lane each.
struct Batch {
    unsigned begin, count = 0;       // where its bytes begin in the output
    unsigned to, length, what;       // of this lane: where they go, and the distance, or IS_LITERAL and one or two bytes

    __device__ void add(Output& out, unsigned bytes, unsigned found) {
        if (out.lane == count) to = out.done, length = bytes, what = found;
        ++count;
        out.done += bytes;
    }

    // Writes them; false if they do not fit, or repeat bytes from before the output.
    __device__ bool write(Output& out) {
        constexpr unsigned SHORT = 16, AT_ONCE = 4;
        bool is_mine = out.lane < count, is_match = is_mine && what < IS_LITERAL;
        if (out.done > out.end || __any_sync(ALL_LANES, is_match && what > to)) return false;
        bool is_late = is_match && (length > SHORT || to - what + length > begin);
        __syncwarp();  // other lanes have written what is read
        if (is_mine && !is_match) {
            out.bytes[to] = u8(what);
            if (length > 1) out.bytes[to + 1] = u8(what >> 8);
        } else if (is_match && !is_late) {
            const u8* from = out.bytes + to - what;
            for (unsigned i = 0; i < length; i += AT_ONCE) {
                u8 found[AT_ONCE];
                for (unsigned j = 0; j < AT_ONCE; ++j)
                    if (i + j < length) found[j] = from[i + j];
                for (unsigned j = 0; j < AT_ONCE; ++j)
                    if (i + j < length) out.bytes[to + i + j] = found[j];
            }
        }
        unsigned end = out.done;
        for (unsigned late = __ballot_sync(ALL_LANES, is_late); late != 0; late &= late - 1) {
            unsigned which = __ffs(late) - 1, bytes = __shfl_sync(ALL_LANES, length, which);
            out.done = __shfl_sync(ALL_LANES, to, which);
            out.copy_match(bytes, __shfl_sync(ALL_LANES, what, which), [] {});
        }
        out.done = begin = end;
        count = 0;
        return true;
    }
};

// Decodes the symbols of a block to its end; false if it is damaged.
__device__ bool decode_symbols(Bits& in, Output& out, const Codes& codes) {
    Batch batch{out.done};
    in.refill();
    unsigned entry = codes.table[unsigned(in.buffer) % (1u << TABLE_BITS)];
    for (;;) {
        unsigned length, what;
        if (entry == 0) {
            unsigned symbol = codes.literals.symbol(in, codes.sorted);
            if (symbol >= USED_LITERALS) return false;
            entry = symbol < END_OF_BLOCK ? entry_of_literal(symbol) : entry_of_length(symbol);
        }
        if (entry & IS_LITERAL) {
            in.drop(entry % 16);
            length = entry >> COUNT & 3, what = entry >> VALUE & 0xffff | IS_LITERAL;
        } else {
            length = in.value(entry);
            if (length == 0) return batch.write(out);
            in.refill();
            unsigned distance = codes.near[unsigned(in.buffer) % (1u << DISTANCE_BITS)];
            if (distance == 0) {
                unsigned symbol = codes.distances.symbol(in, codes.sorted + LITERALS);
                if (symbol >= USED_DISTANCES) return false;
                distance = entry_of_distance(symbol);
            }
            what = in.value(distance);
        }
        in.refill();
        entry = codes.table[unsigned(in.buffer) % (1u << TABLE_BITS)];
        batch.add(out, length, what);
        if (batch.count == 32 && !batch.write(out)) return false;
    }
}

__device__ bool copy_stored(Bits& in, Output& out) {
    in.drop(in.held % 8);
    in.refill();
    unsigned length = in.take(16);
    in.refill();
    if (length != (~in.take(16) & 0xffff)) return false;
    unsigned from = in.position();
    if (from > in.end || length > in.end - from || length > out.end - out.done) return false;
    const u8* bytes = reinterpret_cast<const u8*>(in.words) + from;
    out.copy_literals(length, [&](unsigned i) { return bytes[i]; });
    in.seek(from + length);
    return true;
}

// Adler-32 of the output.
__device__ unsigned checksum(const Output& out) {
    constexpr unsigned MODULUS = 65521;
    __syncwarp();  // other lanes have written it
    u64 plain = 0, weighted = 0;  // at most 2^26 bytes
#pragma unroll 8
    for (unsigned i = out.lane; i < out.end; i += 32) {
        unsigned byte = out.bytes[i];
        plain += byte;
        weighted += u64(out.end - i) * byte;
    }
    unsigned low = plain % MODULUS, high = weighted % MODULUS;
    for (unsigned by = 16; by > 0; by /= 2) {
        low += __shfl_xor_sync(ALL_LANES, low, by);
        high += __shfl_xor_sync(ALL_LANES, high, by);
    }
    return (high + out.end) % MODULUS << 16 | (low + 1) % MODULUS;
}

__device__ bool inflate(Bits in, Output out, Codes codes) {
    in.refill();
    unsigned method = in.take(8), flags = in.take(8);
    if (method % 16 != 8 || method > 0x78 || (method * 256 + flags) % 31 != 0 || flags & 32) return false;
    for (bool is_last = false; !is_last;) {
        in.refill();
        is_last = in.take(1);
        unsigned kind = in.take(2), literals = LITERALS, distances = DISTANCES;
        if (kind == 3) return false;
        if (kind == 0) {
            if (!copy_stored(in, out)) return false;
        } else {
            if (kind == 1) fixed_lengths(codes.table, in.lane);
            else if (!read_lengths(in, codes, literals, distances)) return false;
            if (!codes.make(literals, distances, in.lane) || !decode_symbols(in, out, codes)) return false;
            __syncwarp();  // the tables have been read
        }
        if (in.position() > in.end) return false;
    }
    in.drop(in.held % 8);
    if (out.done != out.end || in.position() + 4 > in.end) return false;
    in.refill();
    return checksum(out) == __byte_perm(unsigned(in.buffer), 0, 0x0123);
}

template <int = 0>
__global__ void __launch_bounds__(32) decode_zlib(Streams streams, int* fault) {
    __shared__ unsigned table[1 << TABLE_BITS];
    __shared__ unsigned near[1 << DISTANCE_BITS];
    __shared__ unsigned sorted[LITERALS + DISTANCES];
    constexpr u64 LARGEST = 1u << 26;
    u64 source_bytes = streams.source_bytes[blockIdx.x], target_bytes = streams.target_bytes[blockIdx.x];
    bool is_right = source_bytes <= LARGEST && target_bytes <= LARGEST;
    if (is_right) {
        Bits in(reinterpret_cast<const u8*>(streams.sources[blockIdx.x]), source_bytes, threadIdx.x);
        Output out{reinterpret_cast<u8*>(streams.targets[blockIdx.x]), 0, unsigned(target_bytes), threadIdx.x};
        is_right = inflate(in, out, Codes{{}, {}, table, near, sorted});
    }
    if (!is_right && threadIdx.x == 0) atomicMin(fault, int(blockIdx.x));
}
