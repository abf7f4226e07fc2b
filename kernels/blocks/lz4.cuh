// LZ4 blocks (raw streams without a frame), decoded and encoded by a warp each.
//
// Contract of decoding: a stream of `source_bytes` decodes to exactly `target_bytes`, or is refused: `fault` becomes the
// smallest index of a refused stream, and its bytes are undefined. Any bytes may be decoded: lengths, offsets and positions
// are compared with what is left of stream and output before they are used, and every step consumes bytes of the stream.
// A stream is refused exactly if LZ4's own decoder refuses it, or if a match has the offset 0, which that decoder lets pass.
//
// Algorithm: each of 32 lanes reads a sequence (literals and match) as if it began at its own byte; from these the warp takes
// the ones that do, one after another, and copies by 32 lanes. Byte i of a match of offset d is byte i % d of the d bytes
// before it, so its copy never depends on itself. Encoding: each lane looks for its own four bytes among the lanes before it,
// then in a hash table; the first lane that finds them begins a match. As in LZ4's own encoder, positions within matches are
// not kept in the table: with them, the bytes of smooth images found matches half as long.
// Source: lz4_Block_format.md of LZ4 1.10, with its rules for the end.
//
// Floor on an H200: a stream is read and its output written once, 4.2 TB/s. Sequences are the limit: they follow one another,
// and of shuffled u16 each brings about 30 bytes. Measured, GB/s of samples, beside nvCOMP 6: 24 MiB of noisy u16 as Blosc
// stores them decode at 24 (nvCOMP 16), 64 MiB at 55 (38), and are encoded at 50 (5) and 71 (13). A copy of the last 8 KiB of
// the output in shared memory did not help: 22 and 58.
#pragma once

constexpr unsigned LAST_LITERALS = 5, LAST_MATCH = 12, LEAST_MATCH = 4, LONG = 15;
constexpr unsigned ALL_LANES = 0xffffffffu;
// A warp holds this much of its stream in shared memory, and 128 bytes more in registers.
constexpr unsigned HELD = 256, PIECE = 128;

// A stream; positions count from the start of its first aligned word. Aligned words may hold bytes of its neighbours.
struct Input {
    const unsigned* words;
    unsigned* held;  // bytes `first` to `first` + HELD, each at its position % HELD
    unsigned begin, end, lane, first, ahead;

    __device__ Input(const u8* bytes, unsigned nbytes, unsigned* held, unsigned lane) : held(held), lane(lane) {
        begin = reinterpret_cast<u64>(bytes) % 4;
        end = begin + nbytes;
        words = reinterpret_cast<const unsigned*>(bytes - begin);
        restart(0);
    }

    __device__ unsigned word(unsigned at) const { return at < end ? words[at / 4] : 0; }

    __device__ void restart(unsigned position) {
        first = position / PIECE * PIECE;
        __syncwarp();
        for (unsigned i = 4 * lane; i < HELD; i += PIECE) held[(first + i) % HELD / 4] = word(first + i);
        __syncwarp();
        ahead = word(first + HELD + 4 * lane);
    }

    // Makes the bytes from `position` to PIECE beyond it readable by `at`. Positions do not decrease from call to call.
    __device__ void seek(unsigned position) {
        if (position - first < PIECE) return;
        if (position - first >= 2 * PIECE) return restart(position);
        __syncwarp();
        held[(first + 4 * lane) % HELD / 4] = ahead;
        __syncwarp();
        first += PIECE;
        ahead = word(first + HELD + 4 * lane);
    }

    __device__ unsigned at(unsigned position) const { return reinterpret_cast<const u8*>(held)[position % HELD]; }

    // Adds the bytes that continue a length; false if it exceeds `limit`.
    __device__ bool lengthen(unsigned& position, unsigned& length, unsigned limit) {
        for (unsigned byte = 255; byte == 255; length += byte) {
            if (position >= end || length > limit) return false;
            seek(position);
            byte = at(position++);
        }
        return length <= limit;
    }

    // The sequence at a position in one word (literals, match length and offset), or 0 if it is longer or the last.
    __device__ unsigned sequence(unsigned position) const {
        if (position >= end) return 0;
        unsigned token = at(position), literals = token / 16, length = token % 16;
        unsigned match = position + 1 + literals;
        if (literals == LONG || match + 3 > end) return 0;
        unsigned offset = at(match) | at(match + 1) << 8, more = length == LONG ? at(match + 2) : 0;
        return more == 255 ? 0 : literals << 25 | (length + more + LEAST_MATCH) << 16 | offset;
    }
};

struct Output {
    u8* bytes;
    unsigned done, end, lane;

    // Whether literals and a match fit as the rules for the end require, and the match begins within the output.
    __device__ bool has_room(unsigned literals, unsigned length, unsigned offset) const {
        unsigned left = end - done;
        return left >= literals + LAST_MATCH && length <= left - literals - LAST_LITERALS && offset > 0
            && offset <= done + literals;
    }

    template <typename Source>
    __device__ void copy_literals(unsigned count, Source from) {
        constexpr unsigned AT_ONCE = 4;
        u8* to = bytes + done;
        for (unsigned i = lane; i < count; i += 32 * AT_ONCE) {
            u8 found[AT_ONCE];
            for (unsigned j = 0; j < AT_ONCE; ++j)
                if (i + 32 * j < count) found[j] = from(i + 32 * j);
            for (unsigned j = 0; j < AT_ONCE; ++j)
                if (i + 32 * j < count) to[i + 32 * j] = found[j];
        }
        done += count;
    }

    // `meanwhile` is called while the first bytes are on their way.
    template <typename Meanwhile>
    __device__ void copy_match(unsigned length, unsigned offset, Meanwhile meanwhile) {
        __syncwarp();  // what other lanes have written is read
        u8* to = bytes + done;
        const u8* from = to - offset;
        unsigned at = lane, step = 32;
        if (offset <= 32) {
            at -= offset * unsigned(__fdividef(lane + 0.5f, float(offset)));
            step -= offset * unsigned(__fdividef(32.5f, float(offset)));
        }
        u8 found = lane < length ? from[at] : 0;
        meanwhile();
        if (lane < length) to[lane] = found;
        for (unsigned i = lane + 32; i < length; i += 32) {
            at += step;
            if (at >= offset) at -= offset;
            to[i] = from[at];
        }
        done += length;
    }
};

// Decodes the sequence at a position; false if the stream is damaged.
__device__ bool decode_sequence(Input& input, Output& output, unsigned& position) {
    if (position >= input.end) return false;
    input.seek(position);
    unsigned token = input.at(position++), literals = token / 16, length = token % 16, left = output.end - output.done;
    if (literals == LONG && !input.lengthen(position, literals, left)) return false;
    if (literals > left || literals > input.end - position) return false;
    if (position + literals <= input.first + HELD) {
        output.copy_literals(literals, [&](unsigned i) { return input.at(position + i); });
    } else {
        const u8* bytes = reinterpret_cast<const u8*>(input.words) + position;
        output.copy_literals(literals, [&](unsigned i) { return bytes[i]; });
    }
    position += literals;
    if (position == input.end) return output.done == output.end;
    if (input.end - position < 2) return false;
    input.seek(position);
    unsigned offset = input.at(position) | input.at(position + 1) << 8;
    position += 2;
    if (length == LONG && !input.lengthen(position, length, left)) return false;
    length += LEAST_MATCH;
    if (!output.has_room(0, length, offset)) return false;
    output.copy_match(length, offset, [] {});
    return true;
}

__device__ bool decode_stream(Input input, Output output) {
    unsigned position = input.begin;
    while (output.done < output.end) {
        input.seek(position);
        unsigned mine = input.sequence(position + input.lane), taken = 0;
        unsigned next = __shfl_sync(ALL_LANES, mine, 0);
        while (next != 0) {
            unsigned literals = next >> 25, length = next >> 16 & 0x1ff, offset = next & 0xffff;
            if (!output.has_room(literals, length, offset)) return false;
            if (input.lane < literals) output.bytes[output.done + input.lane] = input.at(position + taken + 1 + input.lane);
            output.done += literals;
            taken += 3 + literals + (length >= LONG + LEAST_MATCH);
            output.copy_match(length, offset, [&] { next = taken < 32 ? __shfl_sync(ALL_LANES, mine, taken) : 0; });
        }
        position += taken;
        if (taken < 32 && !decode_sequence(input, output, position)) return false;
    }
    return position == input.end;
}

template <int = 0>
__global__ void __launch_bounds__(32) decode_lz4(Streams streams, int* fault) {
    __shared__ unsigned held[HELD / 4];
    constexpr u64 LARGEST = 1u << 30;
    u64 source_bytes = streams.source_bytes[blockIdx.x], target_bytes = streams.target_bytes[blockIdx.x];
    bool is_right = source_bytes <= LARGEST && target_bytes <= LARGEST;
    if (is_right) {
        Input input(reinterpret_cast<const u8*>(streams.sources[blockIdx.x]), source_bytes, held, threadIdx.x);
        Output output{reinterpret_cast<u8*>(streams.targets[blockIdx.x]), 0, unsigned(target_bytes), threadIdx.x};
        is_right = decode_stream(input, output);
    }
    if (!is_right && threadIdx.x == 0) atomicMin(fault, int(blockIdx.x));
}

// The hash table of the encoder holds, for the hash of four bytes, one more than the last position where they began.
constexpr unsigned HASH_BITS = 12;

// The bytes to encode. A word begins at any byte; bytes beyond the end are zero, or a neighbour's.
struct Plain {
    const unsigned* words;
    unsigned skew, nbytes;

    __device__ Plain(const u8* bytes, unsigned nbytes) : nbytes(nbytes) {
        skew = reinterpret_cast<u64>(bytes) % 4;
        words = reinterpret_cast<const unsigned*>(bytes - skew);
    }

    __device__ unsigned word(unsigned position) const {
        unsigned at = position + skew, end = nbytes + skew;
        unsigned low = at < end ? words[at / 4] : 0, high = at / 4 * 4 + 4 < end ? words[at / 4 + 1] : 0;
        return __funnelshift_r(low, high, at % 4 * 8);
    }

    __device__ u8 byte(unsigned position) const { return reinterpret_cast<const u8*>(words)[skew + position]; }

    // How many bytes are the same from `first` and from `second` on, the later, before `end`.
    __device__ unsigned common(unsigned first, unsigned second, unsigned end, unsigned lane) const {
        unsigned length = 0;
        for (;; length += 128) {
            unsigned at = length + 4 * lane;
            unsigned differs = word(first + at) ^ word(second + at);
            unsigned unlike = __ballot_sync(ALL_LANES, differs != 0 || second + at >= end);
            if (unlike == 0) continue;
            unsigned which = __ffs(unlike) - 1, bits = __shfl_sync(ALL_LANES, differs, which);
            length += 4 * which + (bits == 0 ? 0 : (__ffs(bits) - 1) / 8);
            return min(length, end - second);
        }
    }
};

// The encoded bytes, at most `room`. What does not fit is counted, and not written.
struct Encoded {
    u8* bytes;
    unsigned room, done, lane;

    __device__ void put(unsigned value) {
        if (lane == 0 && done < room) bytes[done] = u8(value);
        ++done;
    }

    __device__ bool is_full() const { return done > room; }
    __device__ bool pays(unsigned, unsigned) const { return true; }

    // The rest of a length whose token contains LONG.
    __device__ void put_rest(unsigned length) {
        if (length < LONG) return;
        unsigned full = (length - LONG) / 255;
        for (unsigned i = lane; i < full; i += 32)
            if (done + i < room) bytes[done + i] = 255;
        done += full;
        put((length - LONG) % 255);
    }

    // Literals from `first` on, and a match; length 0: the last literals.
    __device__ void put_sequence(const Plain& plain, unsigned first, unsigned literals, unsigned length, unsigned offset) {
        unsigned more = length == 0 ? 0 : length - LEAST_MATCH;
        put(min(literals, LONG) * 16 + min(more, LONG));
        put_rest(literals);
        for (unsigned i = lane; i < literals; i += 32)
            if (done + i < room) bytes[done + i] = plain.byte(first + i);
        done += literals;
        if (length == 0) return;
        put(offset);
        put(offset >> 8);
        put_rest(more);
    }
};

// How far the bytes have been looked at. `literals`: where those begin that belong to no sequence yet.
struct Search {
    unsigned position, literals, misses;
};

// Puts sequences from the search's position on, until `out` is full or all bytes before `end` have been looked at.
template <typename Out>
__device__ void find_matches(const Plain& plain, unsigned end, Search& search, Out& out, unsigned* table, unsigned lane) {
    constexpr unsigned MOST_OFFSET = 65535;
    unsigned position = search.position, literals = search.literals, misses = search.misses;
    while (position + LAST_MATCH <= end && !out.is_full()) {
        unsigned mine = position + lane, four = plain.word(mine), before = 0;
        bool may_match = mine + LAST_MATCH <= end;
        unsigned* entry = table + (four * 2654435761u >> (32 - HASH_BITS));
        __syncwarp();
        if (may_match) before = *entry;
        unsigned same = __match_any_sync(ALL_LANES, four) & ((1u << lane) - 1);
        if (same) before = position + 32 - __clz(same);
        bool matches = may_match && before > 0 && mine + 1 - before <= MOST_OFFSET && plain.word(before - 1) == four;
        unsigned found = __ballot_sync(ALL_LANES, matches), next = position + 32;
        misses = found ? 0 : misses + 1;
        while (found) {
            unsigned which = __ffs(found) - 1, at = position + which, from = __shfl_sync(ALL_LANES, before, which) - 1;
            unsigned length = plain.common(from, at, end - LAST_LITERALS, lane);
            if (at > literals) {
                bool inside = lane < at - literals && lane < from;
                bool differs = !inside || plain.byte(at - 1 - lane) != plain.byte(from - 1 - lane);
                unsigned more = __ffs(__ballot_sync(ALL_LANES, differs) | 1u << 31) - 1;
                at -= more, from -= more, length += more;
            }
            if (!out.pays(length, at - from)) {
                found &= found - 1;
                continue;
            }
            out.put_sequence(plain, literals, at - literals, length, at - from);
            literals = at + length;
            if (mine > at && mine < literals) may_match = false;
            next = max(next, literals);
            found = literals - position < 32 ? found & ~0u << (literals - position) : 0;
        }
        if (may_match && mine < next) atomicMax(entry, mine + 1);
        position = next + 32 * min(misses / 8, 7u);
    }
    search = {position, literals, misses};
}

// Returns the encoded bytes, or more than fit if the stream does not shrink to `room`.
__device__ unsigned encode_stream(const Plain& plain, Encoded out, unsigned* table, unsigned lane) {
    for (unsigned i = lane; i < 1u << HASH_BITS; i += 32) table[i] = 0;
    Search search{};
    find_matches(plain, plain.nbytes, search, out, table, lane);
    out.put_sequence(plain, search.literals, plain.nbytes - search.literals, 0, 0);
    return out.done;
}

// `target_bytes` become the encoded bytes, or the stream's own number if it does not shrink; the targets have room for it.
template <int = 0>
__global__ void __launch_bounds__(32) encode_lz4(Streams streams) {
    __shared__ unsigned table[1 << HASH_BITS];
    unsigned nbytes = unsigned(streams.source_bytes[blockIdx.x]);
    Plain plain(reinterpret_cast<const u8*>(streams.sources[blockIdx.x]), nbytes);
    Encoded out{reinterpret_cast<u8*>(streams.targets[blockIdx.x]), nbytes, 0, threadIdx.x};
    unsigned encoded = encode_stream(plain, out, table, threadIdx.x);
    if (threadIdx.x == 0) streams.target_bytes[blockIdx.x] = min(encoded, nbytes);
}
