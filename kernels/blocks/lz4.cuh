// LZ4 blocks (raw streams without a frame), decoded by a warp each.
//
// Contract: a stream of `source_bytes` decodes to exactly `target_bytes`, or is refused: `fault` becomes the smallest index
// of a refused stream, and its bytes are undefined. Any bytes may be decoded: lengths, offsets and positions are compared
// with what is left of stream and output before they are used, and every step consumes bytes of the stream.
//
// Algorithm: each of 32 lanes reads a sequence (literals and match) as if it began at its own byte; from these the warp takes
// the ones that do, one after another, and copies by 32 lanes. Byte i of a match of offset d is byte i % d of the d bytes
// before it, so its copy never depends on itself. Source: lz4_Block_format.md of LZ4 1.10, with its rules for the end.
//
// Floor on an H200: a stream is read and its output written once, 4.2 TB/s. Sequences are the limit: they follow one another,
// and of shuffled u16 each brings about 30 bytes. nvCOMP 6 decodes 8 GB/s of 24 MiB, and 20 of 64 MiB.
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

    __device__ bool has_room(unsigned literals, unsigned length, unsigned offset) const {
        unsigned left = end - done;  // literals fit
        return left >= literals + LAST_MATCH && length <= left - literals - LAST_LITERALS && offset > 0
            && offset <= done + literals;
    }

    __device__ void copy_literals(const u8* from, unsigned count) {
        constexpr unsigned AT_ONCE = 4;
        u8* to = bytes + done;
        for (unsigned i = lane; i < count; i += 32 * AT_ONCE) {
            u8 found[AT_ONCE];
            for (unsigned j = 0; j < AT_ONCE; ++j)
                if (i + 32 * j < count) found[j] = from[i + 32 * j];
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
    output.copy_literals(reinterpret_cast<const u8*>(input.words) + position, literals);
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

extern "C" __global__ void __launch_bounds__(32) decode_lz4(Streams streams, int* fault) {
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
