// The rank filter of any window of medium size, any dtype and footprint: a moving window over a tile's sorted samples, as
// in kernels/rank/cpu/ordered.py. Part of rank.cu.
//
// A block sorts the samples of a tile with its halo, so that each has a place in one order. Then each walker, a thread, goes
// along a piece of a line. The window's samples are bits over the places, in shared memory; what enters or leaves flips
// one. The result is the bit with `rank` others below it: a walker keeps the word where it was, and how many lie below it.
// The cost of a result grows with the window's surface, not with its volume.
//
//   load      samples -> keys                          all threads
//     |  barrier
//   sort      4 bits a pass: count, scan, scatter      all threads, three barriers a pass
//     |  barrier
//   places    of each sample; keys by place            all threads
//     |  barrier
//   walk      fill, then for each result: flip, find   each walker by itself, its words in its own bank
//
// Sources: Huang, Yang and Tang (1979) for the moving window; Satish, Harris and Garland (2009) for the sort.
#pragma once

#include "gather.cuh"

constexpr int SORTERS = 128;  // threads of a block
constexpr int DIGITS = 16, BATCH = 8;
constexpr unsigned short MISSING_PLACE = 0xFFFF, NAN_PLACE = 0xFFFE;

struct OrderedTask {
    int outs[3];   // of a tile along the axes
    int sides[3];  // of a tile with its halo
    int pitch;     // of a line of it: 2 above a multiple of 4, so that walkers side by side read different banks
    int each;      // samples of a thread as it sorts: odd, for the same reason
    int pieces;    // of each line, a walker each
    int tiles[3];
};

// Sorts `words` by their upper 16 bits, which keeps the order of equal ones; the result is where it was.
__device__ inline void sort_by_upper_half(unsigned* words, unsigned* spare, unsigned short* counts, int each, int bits) {
    const int thread = threadIdx.x, lane = thread % 32;
    __shared__ unsigned warp_totals[SORTERS / 32];
    for (int shift = 16; shift < 16 + bits; shift += 4) {
#pragma unroll
        for (int digit = 0; digit < DIGITS; ++digit) counts[digit * SORTERS + thread] = 0;
        for (int i = 0; i < each; ++i) ++counts[(words[thread * each + i] >> shift & 15) * SORTERS + thread];
        __syncthreads();
        // Each thread's sixteen counts, in the order of digits and threads, become sums of all before.
        unsigned own = 0;
#pragma unroll
        for (int i = 0; i < DIGITS; ++i) own += counts[thread * DIGITS + i];
        unsigned before = own;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const unsigned other = __shfl_up_sync(~0u, before, apart);
            if (lane >= apart) before += other;
        }
        if (lane == 31) warp_totals[thread / 32] = before;
        __syncthreads();
        before -= own;
        for (int warp = 0; warp < thread / 32; ++warp) before += warp_totals[warp];
#pragma unroll
        for (int i = 0; i < DIGITS; ++i) {
            const unsigned count = counts[thread * DIGITS + i];
            counts[thread * DIGITS + i] = before;
            before += count;
        }
        __syncthreads();
        for (int i = 0; i < each; ++i) {
            const unsigned word = words[thread * each + i];
            spare[counts[(word >> shift & 15) * SORTERS + thread]++] = word;
        }
        __syncthreads();
        unsigned* swapped = words;
        words = spare;
        spare = swapped;
    }
}

// The place of set bit `rank`, from 0, of a word that has more.
__device__ inline int place_of_bit(unsigned word, int rank) {
    int place = 0;
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) {
        const int below = __popc(word & ((1u << half) - 1));
        if (rank >= below) {
            rank -= below;
            word >>= half;
            place += half;
        }
    }
    return place;
}

// A window over places: which are present, how many, and where the last result was.
struct Walker {
    unsigned* bits;  // every `walkers`-th word
    int walkers, present, nans, word, below;  // below: bits in the words before `word`

    // `change`: 1 for what enters, -1 for what leaves. COMPLETE: no sample is missing, none is NaN. No other thread
    // touches these bits, but an atomic operation does not wait for what it flips.
    template <bool COMPLETE>
    __device__ void flip(unsigned short place, int change) {
        if constexpr (!COMPLETE) {
            if (place >= NAN_PLACE) {
                if (place == NAN_PLACE) nans += change;
                return;
            }
            present += change;
        }
        atomicXor(bits + (place >> 5) * walkers, 1u << (place & 31));
        if ((place >> 5) < word) below += change;
    }
    __device__ int find(int rank) {
        unsigned held = bits[word * walkers];
        while (below > rank) {
            held = bits[--word * walkers];
            below -= __popc(held);
        }
        for (int count = __popc(held); below + count <= rank; count = __popc(held)) {
            below += count;
            held = bits[++word * walkers];
        }
        return word * 32 + place_of_bit(held, rank - below);
    }
};

// rank_ordered: one block a tile. SHAPED: not all samples of the box count. COMPLETE: as of `flip`.
template <typename Sample, bool SHAPED, bool COMPLETE>
__global__ void __launch_bounds__(SORTERS) rank_ordered(
    const Sample* __restrict__ in, Sample* __restrict__ out, RankTask task, OrderedTask tile, Sample cval, Sample nodata,
    Sample empty, int whole, const __grid_constant__ Footprint footprint) {
    using Key = KeyOf<Sample>;
    constexpr bool WIDE = sizeof(Sample) > 2;
    extern __shared__ __align__(16) unsigned char memory[];
    const int count = SORTERS * tile.each;
    unsigned* words = reinterpret_cast<unsigned*>(memory);
    unsigned* spare = words + count;
    Key* keys = reinterpret_cast<Key*>(spare + count);  // of floats alone, by position
    unsigned short* counts = reinterpret_cast<unsigned short*>(memory + (8 + (WIDE ? sizeof(Key) : 0)) * count);
    const int thread = threadIdx.x;

    long long block = blockIdx.x;
    long long start[3];
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
        start[axis] = block % tile.tiles[axis] * tile.outs[axis];
        block /= tile.tiles[axis];
    }
    const long long within = block % task.inner, plane = block / task.inner;

    const auto load = [&](int i) {
        const int x = i % tile.pitch, line = i / tile.pitch, y = line % tile.sides[1], z = line / tile.sides[1];
        if (x >= tile.sides[2] || z >= tile.sides[0]) return cval;
        return sample_at(in, task, plane, start[0] + task.axis[0].first + z, start[1] + task.axis[1].first + y,
                         start[2] + task.axis[2].first + x, within, cval);
    };
    for (int i = thread; i < count; i += SORTERS) {
        const Key key = key_of(load(i));
        if constexpr (WIDE) keys[i] = key;
        words[i] = static_cast<unsigned>(key) << 16 | i;
    }
    __syncthreads();
    sort_by_upper_half(words, spare, counts, tile.each, sizeof(Sample) == 1 ? 8 : 16);
    if constexpr (WIDE) {
        for (int part = 1; part < static_cast<int>(sizeof(Sample)) / 2; ++part) {
            for (int i = thread; i < count; i += SORTERS) {
                const unsigned position = words[i] & 0xFFFF;
                words[i] = static_cast<unsigned>(keys[position] >> 16 * part) << 16 | position;
            }
            __syncthreads();
            sort_by_upper_half(words, spare, counts, tile.each, 16);
        }
    }
    // The upper half of `spare` holds the places by position, the lower one keys, or of floats positions, by place.
    unsigned short* by_place = reinterpret_cast<unsigned short*>(spare);
    unsigned short* places = by_place + count;
    for (int i = thread; i < count; i += SORTERS) {
        const unsigned word = words[i], position = word & 0xFFFF;
        Key key = word >> 16;
        if constexpr (WIDE) key = keys[position];
        by_place[i] = WIDE ? position : key;
        const Sample sample = sample_of<Sample>(key);
        places[position] = is_nan(sample) ? (task.omit_nan ? MISSING_PLACE : NAN_PLACE)
                           : task.has_nodata && sample == nodata ? MISSING_PLACE : i;
    }
    __syncthreads();

    // The bits lie where the words were, and behind all else if that is too short.
    const int lines = tile.outs[0] * tile.outs[1], walkers = lines * tile.pieces, held = count / 32;
    unsigned* bits = walkers <= 32 ? words : reinterpret_cast<unsigned*>(counts);
    for (int i = thread; i < walkers * held; i += SORTERS) bits[i] = 0;
    __syncthreads();
    if (thread >= walkers) return;
    const int line = thread % lines, piece = thread / lines;
    const int z = line / tile.outs[1], y = line % tile.outs[1];
    const int step = (tile.outs[2] + tile.pieces - 1) / tile.pieces, begin = piece * step;
    const long long room = min(static_cast<long long>(tile.outs[2]), task.axis[2].out_length - start[2]);
    const int end = static_cast<int>(min(static_cast<long long>(begin + step), room));
    if (start[0] + z >= task.axis[0].out_length || start[1] + y >= task.axis[1].out_length || begin >= end) return;

    const int taps0 = task.axis[0].taps, taps1 = task.axis[1].taps, taps2 = task.axis[2].taps;
    const unsigned short* first = places + (z * tile.sides[1] + y) * tile.pitch + begin;
    Walker walker{bits + thread, walkers, 0, 0, held / 2, 0};
    for (int dz = 0; dz < taps0; ++dz)
        for (int dy = 0; dy < taps1; ++dy)
            for (int dx = 0; dx < taps2; ++dx) {
                if constexpr (SHAPED)
                    if (!(footprint.row[dz * taps1 + dy] >> dx & 1)) continue;
                walker.flip<COMPLETE>(first[(dz * tile.sides[1] + dy) * tile.pitch + dx], 1);
            }
    const long long rank = task.rank.of(whole);
    const long long target =
        ((plane * task.axis[0].out_length + start[0] + z) * task.axis[1].out_length + start[1] + y) * task.axis[2].out_length;
    for (int x = begin; x < end; ++x, ++first) {
        Sample result;
        if (!COMPLETE && walker.nans > 0) {
            result = not_a_number<Sample>();
        } else if (!COMPLETE && walker.present == 0) {
            result = empty;
        } else {
            const bool is_whole = COMPLETE || walker.present == whole;
            const int place = walker.find(static_cast<int>(is_whole ? rank : task.rank.of(walker.present)));
            if constexpr (WIDE) result = sample_of<Sample>(keys[by_place[place]]);
            else result = sample_of<Sample>(by_place[place]);
        }
        out[(target + start[2] + x) * task.inner + within] = result;
        if (x + 1 == end) break;
        for (int dz = 0; dz < taps0; ++dz) {
            const unsigned short* row = first + dz * tile.sides[1] * tile.pitch;
            if constexpr (!SHAPED) {
                // Several places are on their way before the first flip, which no load may pass.
                int dy = 0;
                for (; dy + BATCH <= taps1; dy += BATCH, row += BATCH * tile.pitch) {
                    unsigned short leave[BATCH], enter[BATCH];
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) {
                        leave[i] = row[i * tile.pitch];
                        enter[i] = row[i * tile.pitch + taps2];
                    }
#pragma unroll
                    for (int i = 0; i < BATCH; ++i) {
                        walker.flip<COMPLETE>(leave[i], -1);
                        walker.flip<COMPLETE>(enter[i], 1);
                    }
                }
                for (; dy < taps1; ++dy, row += tile.pitch) {
                    const unsigned short leave = row[0], enter = row[taps2];
                    walker.flip<COMPLETE>(leave, -1);
                    walker.flip<COMPLETE>(enter, 1);
                }
            } else {
                for (int dy = 0; dy < taps1; ++dy, row += tile.pitch) {
                    const unsigned held_bits = footprint.row[dz * taps1 + dy];
                    for (unsigned leave = held_bits & ~(held_bits << 1); leave != 0; leave &= leave - 1)
                        walker.flip<COMPLETE>(row[__ffs(leave) - 1], -1);
                    for (unsigned enter = held_bits & ~(held_bits >> 1); enter != 0; enter &= enter - 1)
                        walker.flip<COMPLETE>(row[__ffs(enter)], 1);
                }
            }
        }
    }
}
