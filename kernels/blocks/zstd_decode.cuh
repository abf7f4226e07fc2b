// Zstandard frames, decoded by a warp for the literals and one for the sequences of each block, and a thread block a frame.
//
// Contract: a frame of `source_bytes` decodes to exactly `target_bytes`, or it is refused: then `fault` becomes the smallest
// index of a refused frame, and the frame's output is undefined. The input may be any bytes: every size, table, offset and
// position is checked against the rest of the frame, the section and the output before it is used, and the number of symbols
// in a section is known before they are decoded. The kernels refuse every frame that libzstd refuses. They also refuse frames
// with a checksum or a dictionary, several frames in one stream, codes of 12 bits, damage that libzstd overlooks (bits left
// in a section), frames above 64 MiB, and frames whose blocks, literals or sequences do not fit the scratch memory. The host
// counts these before it launches the kernels (`zstd_room` in pipeline/codecs/loops/streams.py), so it never waits for the scan.
//
// Algorithm, a kernel each; the second and third begin when all of the one before is done:
//
//   scan     a thread a frame: lists the frame's blocks, and which of them hold the tables that each block uses
//     |
//   decode   a warp: literals of a block     a warp: sequences of a block     (zstd_entropy.cuh; neither waits)
//     |
//   execute  a thread block a frame: copies literals and matches in windows of 4 KiB
//
// A lane decodes sequences one by one. After 32 of them, all lanes find where each begins in the block's output and literals.
// Offsets that are repeated from an earlier block are not known yet: they are written as which one, and how much less. In a window, every byte looks for its sequence, and so for the byte that it repeats. If that one is in the
// window too, it links to it; links are followed by doubling. So what a match waits for is at most 12 steps away, and long
// chains of short matches, as the high bytes of images have them, cost no more than others.
//
// Floor on an H200: a frame is read and its output written once, 4.2 TB/s. Sequences are the limit: a lane takes some 400
// cycles for each, and literals some 90. Measured, GB/s of 64 MiB (256 MiB) of shuffled u16, one H200, 2026-11-27: noisy
// cells in frames of 512 KiB 32 (70), 1 MiB 22, 8 MiB 5; with 7 bits of noise in frames of 512 KiB 21 (57), 256 KiB 26; the
// same with twice as many sequences (level 9) 13. libzstd on 16 cores: 8. If one lane adds up lengths and offsets too, the
// first and the last take 14 % longer. Copying matches one after another by a warp, as
// zlib.cuh does, made cells 15, in frames of 8 MiB 1.6.
// Source: RFC 8878.
#pragma once

#include "zstd_entropy.cuh"

namespace zstd {

// The blocks of a frame, listed; false if its headers are damaged.
__device__ bool scan_frame(Reader in, u64 target_bytes, unsigned& first, const Scratch& scratch) {
    unsigned magic = unsigned(in.take(4)), flags = unsigned(in.take(1)), form = flags >> 6;
    bool is_single = flags & 32, has_size = is_single || form > 0;
    // A reserved bit, a checksum, a dictionary.
    if (magic != MAGIC || flags & 15) return false;
    u64 window = target_bytes;
    if (!is_single) {
        unsigned found = unsigned(in.take(1)), log = 10 + found / 8;
        if (log > 31) return false;
        window = (8ull + found % 8) << (log - 3);
    }
    u64 size = in.take(has_size ? 1 << form : 0) + (form == 1 ? 256 : 0);
    if (has_size && size != target_bytes) return false;
    unsigned longest = unsigned(window < LONGEST_BLOCK ? window : LONGEST_BLOCK), tree = NONE, tables[TABLES] = {NONE, NONE, NONE};
    u64 literals_left = target_bytes, sequences_left = target_bytes / 3;  // each makes three bytes or more
    unsigned* link = &first;
    for (bool is_last = false; !is_last;) {
        unsigned head = unsigned(in.take(3)), type = head >> 1 & 3;
        is_last = head & 1;
        const u8* source = in.skip(type == RLE ? 1 : head >> 3);
        if (!in.is_right || type == REPEATED || head >> 3 > longest) return false;
        u64 number = atomicAdd(scratch.used, u64(1));
        if (number >= scratch.most_parts) return false;
        Part& p = scratch.parts[number];
        p.source = source;
        p.bytes = p.decoded = head >> 3;
        p.type = RAW;
        p.next = NONE;
        p.is_damaged = 0;
        *link = unsigned(number);
        link = &p.next;
        if (type == ENCODED) {
            Reader part{p.source, p.source + p.bytes};
            LiteralsHeader found;
            SequencesHeader lengths;
            if (!found.read(part) || !lengths.read(part)) return false;
            if (found.count > longest || found.count > literals_left || lengths.count > sequences_left) return false;
            if (found.type == ENCODED) tree = unsigned(number);
            if (found.type == REPEATED && tree == NONE) return false;
            for (unsigned t = 0; t < TABLES && lengths.count > 0; ++t) {
                if (lengths.mode(t) != REPEATED) tables[t] = unsigned(number);
                if (tables[t] == NONE) return false;
                p.tables[t] = tables[t];
            }
            p.tree = tree;
            p.plain = found.type == RAW ? found.data : nullptr;
            unsigned kept = found.type == RAW ? 0 : found.count;
            p.literals = atomicAdd(scratch.used + 1, u64(kept));
            p.literal_count = found.count;
            literals_left -= found.count;
            p.sequences = atomicAdd(scratch.used + 2, u64(lengths.count + 1));
            p.sequence_count = lengths.count;
            if (p.literals + kept > scratch.most_literals) return false;
            if (p.sequences + lengths.count + 1 > scratch.most_sequences) return false;
            sequences_left -= lengths.count;
        }
        p.type = type;
    }
    return in.at == in.end;
}

constexpr unsigned THREADS = 256, WINDOW = 4096;

// Copies bytes by all threads, a word each.
__device__ void copy_bytes(u8* to, const u8* from, unsigned count) {
    constexpr unsigned AT_ONCE = 4;
    Plain plain(from, count);
    unsigned head = min(count, unsigned(-reinterpret_cast<u64>(to) % 4)), words = (count - head) / 4, tail = head + 4 * words;
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    if (threadIdx.x < count - tail) to[tail + threadIdx.x] = from[tail + threadIdx.x];
    unsigned* aligned = reinterpret_cast<unsigned*>(to + head);
    for (unsigned i = threadIdx.x; i < words; i += THREADS * AT_ONCE) {
        unsigned found[AT_ONCE];
        for (unsigned j = 0; j < AT_ONCE; ++j)
            if (i + THREADS * j < words) found[j] = plain.word(head + 4 * (i + THREADS * j));
        for (unsigned j = 0; j < AT_ONCE; ++j)
            if (i + THREADS * j < words) aligned[i + THREADS * j] = found[j];
    }
}

// Sequences that are executed at once, and a window of their output: of each byte its value, or which byte before it has it.
struct Execution {
    unsigned start[THREADS + 1], literals[THREADS + 1], offset[THREADS];
    unsigned short links[2][WINDOW];
    u8 value[WINDOW];

    // The last sequence that starts at a position or before it.
    __device__ unsigned find(unsigned position, unsigned count) const {
        unsigned found = 0;
        for (unsigned step = THREADS / 2; step > 0; step /= 2)
            if (found + step < count && start[found + step] <= position) found += step;
        return found;
    }

    __device__ void fill_window(u8* out, const u8* from, unsigned begin, unsigned end, unsigned count) {
        unsigned short *link = links[0], *further = links[1];
        for (unsigned at = begin + threadIdx.x; at < end; at += THREADS) {
            unsigned s = find(at, count), i = at - begin, within = at - start[s], plain = literals[s + 1] - literals[s];
            const u8* source = from + literals[s] + within;
            link[i] = (unsigned short)(i);
            if (within >= plain) {
                unsigned distance = offset[s], repeated = within - plain;
                if (repeated >= distance) repeated %= distance;
                unsigned before = start[s] + plain - distance + repeated;
                source = out + before;
                if (before >= begin) {
                    link[i] = (unsigned short)(before - begin);
                    continue;
                }
            }
            value[i] = *source;
        }
        __syncthreads();
        for (bool is_open = true; is_open;) {
            bool differs = false;
            for (unsigned i = threadIdx.x; i < end - begin; i += THREADS) {
                unsigned short before = link[i];
                further[i] = link[before];
                differs = differs || further[i] != before;
            }
            is_open = __syncthreads_or(differs);
            unsigned short* other = link;
            link = further, further = other;
        }
        for (unsigned i = threadIdx.x; i < end - begin; i += THREADS) out[begin + i] = value[link[i]];
        __syncthreads();
    }

    // Writes the literals and matches of a block; false if a match begins before the output.
    __device__ bool execute(const Part& p, const Scratch& scratch, u8* out, unsigned done, const unsigned* repeats) {
        unsigned rest = 0, total = p.sequence_count;
        const u8* plain = p.plain ? p.plain : scratch.literals + p.literals;
        const u64* sequences = scratch.sequences + p.sequences;
        for (unsigned first = 0; first < total; first += THREADS) {
            unsigned count = min(THREADS, total - first), t = threadIdx.x;
            bool is_right = true;
            if (t < count) {
                u64 sequence = sequences[first + t], next = sequences[first + t + 1];
                start[t] = done + unsigned(sequence >> AT_OUTPUT);
                literals[t] = unsigned(sequence >> AT_LITERALS) & POSITION;
                offset[t] = offset_of(unsigned(sequence) & OFFSET, repeats);
                unsigned behind = unsigned(next >> AT_LITERALS) & POSITION;
                is_right = offset[t] > 0 && offset[t] <= start[t] + behind - literals[t];
                if (t + 1 == count) start[count] = done + unsigned(next >> AT_OUTPUT), literals[count] = behind;
            }
            if (!__syncthreads_and(is_right)) return false;
            unsigned end = start[count];
            rest = literals[count];
            for (unsigned begin = start[0]; begin < end; begin += WINDOW)
                fill_window(out, plain, begin, min(begin + WINDOW, end), count);
        }
        copy_bytes(out + done + p.decoded - (p.literal_count - rest), plain + rest, p.literal_count - rest);
        return true;
    }
};

__device__ bool execute_frame(unsigned number, const Scratch& scratch, u8* out, unsigned end, Execution& execution) {
    unsigned repeats[3] = {1, 4, 8}, done = 0;
    for (; number != NONE; number = scratch.parts[number].next) {
        const Part& p = scratch.parts[number];
        if (p.is_damaged || p.decoded > end - done) return false;
        if (p.type == RAW) {
            copy_bytes(out + done, p.source, p.bytes);
        } else if (p.type == RLE) {
            for (unsigned i = threadIdx.x; i < p.bytes; i += THREADS) out[done + i] = *p.source;
        } else {
            __syncthreads();  // what other threads have written is read
            if (!execution.execute(p, scratch, out, done, repeats)) return false;
            unsigned found[3];
            for (unsigned i = 0; i < 3; ++i) found[i] = offset_of(p.repeats[i], repeats);
            for (unsigned i = 0; i < 3; ++i) repeats[i] = found[i];
        }
        done += p.decoded;
    }
    return done == end;
}

}  // namespace zstd

template <int = 0>
__global__ void scan_zstd(Streams streams, unsigned count, zstd::Scratch scratch) {
    unsigned frame = blockIdx.x * blockDim.x + threadIdx.x;
    if (frame >= count) return;
    const u8* source = reinterpret_cast<const u8*>(streams.sources[frame]);
    u64 source_bytes = streams.source_bytes[frame], target_bytes = streams.target_bytes[frame];
    unsigned first = zstd::NONE;
    constexpr u64 LARGEST = 1u << 26;
    bool is_right = source_bytes <= LARGEST && target_bytes <= LARGEST
        && zstd::scan_frame({source, source + source_bytes}, target_bytes, first, scratch);
    scratch.first[frame] = is_right ? first : zstd::NONE;
}

template <int = 0>
__global__ void __launch_bounds__(64) decode_zstd(zstd::Scratch scratch) {
    __shared__ unsigned short codes[1 << zstd::TREE_BITS];
    __shared__ u64 states[zstd::TABLES_SIZE];
    __shared__ u64 weight_states[1 << zstd::WEIGHT_BITS];
    __shared__ short counts[(zstd::TABLES + 2) * zstd::MOST_SYMBOLS];
    __shared__ unsigned short first[256];
    __shared__ u8 weights[256];
    __shared__ unsigned stream_words[zstd::Streams4::STREAMS][zstd::Streams4::HELD], words[128];
    __shared__ u8 symbols[zstd::Streams4::STREAMS][zstd::Streams4::ROUND];
    __shared__ zstd::Found found;
    u64 count = min(*scratch.used, scratch.most_parts);
    unsigned lane = threadIdx.x % 32;
    for (u64 number = blockIdx.x; number < count; number += gridDim.x) {
        zstd::Part& p = scratch.parts[number];
        if (p.type != zstd::ENCODED) continue;
        short* own = counts + (zstd::TABLES + 1) * zstd::MOST_SYMBOLS;
        bool is_right = threadIdx.x < 32
            ? zstd::decode_literals(scratch, p, {codes, first, weights, own, weight_states, 0},
                                     {stream_words, symbols}, lane)
            : zstd::decode_sequences(scratch, p, states, counts, words, found, lane);
        if (!is_right) p.is_damaged = 1;
        __syncwarp();  // the tables have been read
    }
}

template <int = 0>
__global__ void __launch_bounds__(zstd::THREADS) execute_zstd(Streams streams, zstd::Scratch scratch, int* fault) {
    __shared__ zstd::Execution execution;
    unsigned frame = blockIdx.x, first = scratch.first[frame];
    u8* out = reinterpret_cast<u8*>(streams.targets[frame]);
    unsigned end = unsigned(streams.target_bytes[frame]);
    if (first == zstd::NONE || !zstd::execute_frame(first, scratch, out, end, execution))
        if (threadIdx.x == 0) atomicMin(fault, int(frame));
}
