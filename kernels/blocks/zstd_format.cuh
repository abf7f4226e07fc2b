// Zstandard frames: what the kernels of zstd_decode.cuh know of a block, and its headers. Source: RFC 8878.
#pragma once

namespace zstd {

constexpr unsigned MAGIC = 0xfd2fb528, LONGEST_BLOCK = 128 << 10, NONE = ~0u;
// Types of blocks, literals and tables. Tables of type 0 are those of the format. REPEATED: as in an earlier block.
constexpr unsigned RAW = 0, RLE = 1, ENCODED = 2, REPEATED = 3;
// Tables: of literal lengths, offsets, match lengths. Bits of their states at most, their symbols, and the tables of the format.
constexpr unsigned TABLES = 3, MOST_SYMBOLS = 53;
__constant__ unsigned char table_bits[TABLES] = {9, 8, 9}, table_symbols[TABLES] = {36, 32, 53}, known_bits[TABLES] = {6, 5, 6};
__constant__ signed char known_counts[TABLES][MOST_SYMBOLS] = {
    {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1},
    {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1,  1,  1,  1, 1,
     1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1}};
// A sequence: where it begins in the block's output and literals, and the offset of its match. An offset of an earlier block
// has OF_EARLIER, which of the three (2 bits), and how much less it is (24).
constexpr unsigned AT_OUTPUT = 46, AT_LITERALS = 28, POSITION = (1 << 18) - 1, OFFSET = (1 << 28) - 1;
constexpr unsigned OF_EARLIER = 1 << 27, WHICH = 24;

// An offset that is one of some before it, less a number, which may themselves be of an earlier block; 0 if there is none.
__device__ unsigned offset_of(unsigned offset, const unsigned* repeats) {
    if (!(offset & OF_EARLIER)) return offset;
    unsigned which = offset >> WHICH & 3, less = offset & ((1u << WHICH) - 1);
    unsigned from = which == 0 ? repeats[0] : which == 1 ? repeats[1] : repeats[2];
    if (from & OF_EARLIER) return from + less;
    return from > less ? from - less : 0;
}

// A block of a frame.
struct Part {
    const u8* source;        // after its header
    const u8* plain;         // literals that the block holds as they are
    u64 literals, sequences; // otherwise, and of the sequences: the first in the scratch memory
    unsigned bytes;          // of the source; if RLE, of the output
    unsigned type;
    unsigned literal_count, sequence_count;
    unsigned tree, tables[TABLES];  // the blocks that describe them
    unsigned next;           // of the frame, or NONE
    unsigned decoded;        // bytes of the output
    unsigned repeats[3];     // the offsets that the next block repeats
    unsigned is_damaged;
};
static_assert(sizeof(Part) == 88, "as in cuda.py");

// Memory between the kernels. used: how many parts, bytes of literals, and sequences, with one more for each block that has
// them; zero at first, and at most what follows.
struct Scratch {
    u64 *used, *sequences;
    Part* parts;
    unsigned* first;         // of each frame: its first block, or NONE
    u8* literals;
    u64 most_parts, most_literals, most_sequences;
};

// Bytes in order. After the end they are zero, and `is_right` is false.
struct Reader {
    const u8 *at, *end;
    bool is_right = true;

    __device__ const u8* skip(u64 count) {
        const u8* from = at;
        if (u64(end - at) < count) is_right = false, at = end;
        else at += count;
        return from;
    }

    __device__ u64 take(unsigned count) {
        const u8* from = skip(count);
        u64 value = 0;
        for (unsigned i = 0; i < count && is_right; ++i) value |= u64(from[i]) << (8 * i);
        return value;
    }
};

struct LiteralsHeader {
    unsigned type, count, bytes, streams;
    const u8* data;

    // Takes the whole section.
    __device__ bool read(Reader& in) {
        if (in.at == in.end) return false;
        unsigned form = *in.at >> 2 & 3;
        type = *in.at & 3;
        if (type <= RLE) {
            unsigned size = form == 3 ? 3 : form == 1 ? 2 : 1;
            count = unsigned(in.take(size)) >> (size == 1 ? 3 : 4);
            bytes = type == RAW ? count : 1;
        } else {
            unsigned bits = form < 2 ? 10 : form == 2 ? 14 : 18, mask = (1u << bits) - 1;
            u64 head = in.take(form < 2 ? 3 : form + 2);
            count = unsigned(head >> 4) & mask;
            bytes = unsigned(head >> (4 + bits)) & mask;
            streams = form == 0 ? 1 : 4;
            if (count < (streams == 4 ? 6 : 1)) return false;
        }
        data = in.skip(bytes);
        return in.is_right && count <= LONGEST_BLOCK;
    }
};

struct SequencesHeader {
    unsigned count, modes;

    __device__ bool read(Reader& in) {
        count = unsigned(in.take(1));
        if (count == 255) count = 0x7f00 + unsigned(in.take(2));
        else if (count > 127) count = (count - 128) << 8 | unsigned(in.take(1));
        if (count == 0) return in.is_right && in.at == in.end;
        modes = unsigned(in.take(1));
        return in.is_right && modes % 4 == 0;
    }

    __device__ unsigned mode(unsigned table) const { return modes >> (6 - 2 * table) & 3; }
};

}  // namespace zstd
