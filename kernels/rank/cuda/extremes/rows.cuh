// The rows of one tile of columns and one band, loaded with what the border modes put beyond the edges, and stored. Part of
// rank.cu.
//
// Every other band goes upwards, so that neighbours read the rows that both need at the same time. Columns beyond an edge
// are those of others: their results down the columns are taken from shared memory (`completed`), if the border mode names
// columns of the tile; else each sample is loaded from where it lies (`gathered`).
#pragma once

#include "cuda/extremes/vectors.cuh"

struct BoxTask {
    long long planes, in_plane, out_plane;  // samples from plane to plane
    long long image_plane, image_pitch;     // and from row to row, of an image that is subtracted
    int in_pitch, out_pitch;                // samples from row to row
    int columns, out_columns;
    int tile;                          // results of a tile
    int rows, out_rows, tiles, bands;  // bands of each phase
    int band;                          // rows of results of a band
    int first_y, first_x, mode_y, mode_x;
    int taps_y, taps_x, step, pair;
    int inner;  // samples of a pixel of a row, from one of a window to the next
    int slots;        // of a ring
    int span, steps;  // of sweeps.cuh: threads of a span, steps of a warp along rows
    int is_first, is_last, omit_nan, has_nodata;
    int aligned_in, aligned_out, aligned_image;
    int subtracts;  // 1: the results from an image, 2: an image from the results
};

// The vector at x of a line, of samples from beyond its ends. `from` holds where each comes from, a negative one from outside.
template <typename Sample>
__device__ __noinline__ Vector<Sample> gathered(const Sample* line, const int* from, Sample cval) {
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        Word<Sample> word = 0;
#pragma unroll
        for (int i = SAMPLES_A_WORD<Sample> - 1; i >= 0; --i) {
            const int at = from[(k * SAMPLES_A_WORD<Sample> + i) * blockDim.x];
            if constexpr (SAMPLES_A_WORD<Sample> > 1) word <<= 8 * sizeof(Sample);
            word |= bits_of(at < 0 ? cval : line[at]);
        }
        found.word[k] = word;
    }
    return found;
}

// The vector at x of a row of results, whose samples from beyond the ends come from others of the row in shared memory.
template <typename Sample>
__device__ __noinline__ Vector<Sample> completed(Vector<Sample> own, const Vector<Sample>* row, const int* from, int x, int columns,
                                                 long long base, Word<Sample> beyond) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = x + k * EACH + i, source = from[(k * EACH + i) * blockDim.x];
            const long long place = source - base;
            if ((at >= 0 && at < columns) || (source >= 0 && (place < 0 || place >= blockDim.x * Vector<Sample>::SAMPLES))) continue;
            if constexpr (EACH == 1) {
                own.word[k] = source < 0 ? beyond : reinterpret_cast<const Word<Sample>*>(row)[place];
            } else {
                const int by = i * 8 * static_cast<int>(sizeof(Sample));
                const Word<Sample> bits = source < 0 ? beyond : bits_of(reinterpret_cast<const Sample*>(row)[place]);
                own.word[k] = (own.word[k] & ~(((1u << 8 * sizeof(Sample)) - 1) << by)) | bits << by;
            }
        }
    }
    return own;
}

// The samples of a line from `at` on, of which some may lie beyond its ends.
template <typename Sample>
__device__ __noinline__ Vector<Sample> some_of(const Sample* line, long long at, long long count) {
    constexpr int EACH = SAMPLES_A_WORD<Sample>;
    Vector<Sample> found = {};
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i) {
            const long long each = at + k * EACH + i;
            if constexpr (EACH > 1) found.word[k] <<= 8 * sizeof(Sample);
            if (each >= 0 && each < count) found.word[k] |= bits_of(line[each]);
        }
    }
    return found;
}

// The vector at x of a line of at least as many samples, whatever its address; samples beyond the ends are any.
template <typename Sample>
__device__ __noinline__ Vector<Sample> vector_of(const Sample* line, int x, int columns) {
    constexpr int SAMPLES = Vector<Sample>::SAMPLES;
    const int begin = max(0, min(x, columns - SAMPLES));
    const Vector<Sample> found = vector_at(line + begin, false);
    return shifted(found, found, max(0, min(x - begin, SAMPLES - 1)));
}

// a - b, which saturates; nodata where either is missing. IS_ORDERED: no sample of b exceeds that of a.
template <bool IS_ORDERED = false, typename Sample>
__device__ inline Vector<Sample> difference(const Vector<Sample>& a, const Vector<Sample>& b, int has_nodata, Sample nodata) {
    Vector<Sample> found;
#pragma unroll
    for (int k = 0; k < Vector<Sample>::WORDS; ++k) {
        if constexpr (SAMPLES_A_WORD<Sample> == 1) {
            const Sample one = sample_in<Sample>(a.word[k], 0), other = sample_in<Sample>(b.word[k], 0);
            found.word[k] = bits_of(has_nodata && (one == nodata || other == nodata) ? nodata : one - other);
        } else if constexpr (same<Sample, short>) {
            found.word[k] = __vsubss2(a.word[k], b.word[k]);
        } else {
            // No sample borrows from the next.
            found.word[k] = a.word[k] - (IS_ORDERED ? b.word[k] : extreme<Sample, true>(a.word[k], b.word[k]));
        }
    }
    return found;
}

template <typename Sample>
struct Band {
    static constexpr int SAMPLES = Vector<Sample>::SAMPLES, WORDS = Vector<Sample>::WORDS;
    const BoxTask& task;
    const Sample *in, *image;  // of this plane
    Sample* out;
    int total;             // rows to read
    int in_y, out_y, on;   // of the first row, and of the result whose window ends in it; steps from row to row
    int c0, base, x;  // the tile's first result; the places where the threads' vectors, and this thread's, begin
    int ahead;        // samples from `base` to the window of result c0
    bool is_inside, is_idle, is_edge, is_plain, is_far;
    bool gathers = false, fills = false;  // for all threads

    // Block `rest` of the launch, whose `threads` hold a vector each; every other band goes upwards if it `may_turn`. `from` gets the
    // columns of samples beyond the edges.
    __device__ Band(const Sample* in, Sample* out, const Sample* image, const BoxTask& task, unsigned rest, int thread,
                    int threads, int* from, bool may_turn)
        : task(task), in(in), image(image), out(out) {
        const int tile = rest % task.tiles;
        rest /= task.tiles;
        const int phase = rest % task.step;
        rest /= task.step;
        const int number = rest % task.bands, y0 = number * task.band;
        const long long plane = rest / task.bands;
        const int y1 = min(y0 + task.band, (task.out_rows - phase + task.step - 1) / task.step);
        total = y0 < y1 ? y1 - y0 + task.taps_y - 1 : 0;
        this->in += plane * task.in_plane, this->out += plane * task.out_plane;
        if (task.subtracts) this->image += plane * task.image_plane;
        const bool upwards = may_turn && number % 2 == 1;
        on = upwards ? -task.step : task.step;
        in_y = task.first_y + phase + (upwards ? y0 + total - 1 : y0) * task.step;
        out_y = phase + (upwards ? y1 - 1 : y0) * task.step - (task.taps_y - 1) * on;

        // Vectors of results begin at up to `slack` samples before the tile.
        c0 = tile * task.tile;
        base = (c0 + task.first_x - (task.aligned_out ? 0 : SAMPLES - 1)) & ~(SAMPLES - 1);
        x = base + thread * SAMPLES;
        ahead = c0 + task.first_x - base;
        const int tile_end = min(c0 + task.tile, task.out_columns);
        const int end = tile_end + task.first_x + task.taps_x - 1;  // of what is needed
        is_inside = x >= 0 && x + SAMPLES <= task.columns, is_idle = x >= end, is_edge = !is_inside && !is_idle;
        is_plain = is_inside && !is_idle && task.aligned_in && task.pair == 0;
        is_far = false;
        if (is_edge) {
            for (int i = 0; i < SAMPLES; ++i) {
                const int at = x + i, source = border_index(at, task.columns, task.mode_x);
                from[i * threads] = source;
                const bool is_needed = at >= c0 + task.first_x && at < end && source >= 0;
                if (task.columns < SAMPLES || (is_needed && (source < base || source >= min(base + threads * SAMPLES, end))))
                    is_far = true;
            }
        }
        needs_columns = base < 0 || end > task.columns;
    }

    // With what all threads found: whether any is far.
    __device__ void settle(bool is_any_far) { gathers = is_any_far, fills = !gathers && needs_columns; }

    // Rows n … of the band.
    template <bool LEAST, int ROWS>
    __device__ inline void fetch(Vector<Sample> (&row)[ROWS], int n, const int* from, Sample cval) const {
        const int first = in_y + n * on, last = first + (ROWS - 1) * on;
        if (is_plain && min(first, last) >= 0 && max(first, last) < task.rows) {
            const Sample* line = in + first * static_cast<long long>(task.in_pitch) + x;
            const long long stride = on * static_cast<long long>(task.in_pitch);
#pragma unroll
            for (int j = 0; j < ROWS; ++j) row[j] = loaded_vector<Sample>(line + j * stride);
            return;
        }
        long long place[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            int y = first + j * on;
            if (y < 0 || y >= task.rows) y = index_beyond(y, task.rows, task.mode_y);
            place[j] = is_idle || y < 0 ? -1 : y * static_cast<long long>(task.in_pitch);
            row[j] = splat<Sample>(filled(cval));
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (place[j] < 0) continue;
            const Sample* line = in + place[j];
            if (is_inside) {
                row[j] = task.aligned_in ? loaded_vector<Sample>(line + x)
                                         : vector_at(line + x, place[j] < (task.rows - 1ll) * task.in_pitch);
                if (task.pair > 0 && x + task.pair + SAMPLES <= task.columns)
                    row[j] = extreme<LEAST>(row[j], loaded_vector<Sample>(line + x + task.pair));
            } else if (gathers) {
                row[j] = gathered(line, from, cval);
            } else if (x >= 0 && x < task.columns) {  // the row ends within the vector
                const Vector<Sample> last = vector_at(line + task.columns - SAMPLES, false);
                row[j] = shifted(last, last, x + SAMPLES - task.columns);
            }
        }
    }

    // Of the results whose windows end in row n: where the thread's vector begins, `before` samples before its own columns, so
    // that it is stored whole.
    struct Results {
        Sample* target;
        int y, place, before;
        bool is_whole;
    };
    __device__ inline Results results(int n, int thread) const {
        const int y = out_y + n * on;
        Sample* first = out + (y * static_cast<long long>(task.out_pitch) + c0);
        const int before = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first)) % 16 / sizeof(Sample);
        const int place = c0 + thread * SAMPLES - before;
        return {first + (thread * SAMPLES - before), y, place, before, place >= 0 && place + SAMPLES <= task.out_columns};
    }

    // The vector of the image that results are subtracted from, or that is subtracted from them.
    __device__ inline Vector<Sample> image_at(const Results& to) const {
        const Sample* other = image + to.y * task.image_pitch;
        if (to.is_whole)
            return vector_at(other + to.place, to.place + 2 * SAMPLES <= task.out_columns);
        return some_of(other, to.place, task.out_columns);
    }

    __device__ inline void store(const Results& to, Vector<Sample> found, const Vector<Sample>& theirs, Sample nodata) const {
        if (task.subtracts == 1) found = difference(theirs, found, task.has_nodata, nodata);
        if (task.subtracts == 2) found = difference(found, theirs, task.has_nodata, nodata);
        if (to.is_whole) {
            store_vector(to.target, found);
        } else {
#pragma unroll
            for (int k = 0; k < WORDS; ++k)
                store_some<Sample>(to.target - to.place, to.place + k * SAMPLES_A_WORD<Sample>, found.word[k], 0, task.out_columns);
        }
    }

  private:
    bool needs_columns;
};
