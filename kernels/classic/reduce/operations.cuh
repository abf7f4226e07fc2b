// The operations of reduce_tiles. An operation has Value (of the input), Column (a thread's accumulator for one column of
// a tile) and State (a partial result); start() is an empty column and add(column, value, row) adds the value of a row;
// state(column, rows, first, step) is the state of a column of `rows` values with indices first, first + step, …; none()
// is the state of no values and join(left, right) that of both.
#pragma once

constexpr int ROWS = 16;  // of a tile

template <typename T>
__device__ inline bool is_nan(T value) {
    return value != value;
}

// The default: values are added one by one, as loaded.
template <typename T>
struct OneByOne {
    typedef T Value;
    typedef T Loaded;
    static constexpr int PER_WORD = 1;
    static constexpr int BLOCKS = 0;  // minimum per multiprocessor; 0: the compiler's choice
};

// Sums use the accumulator's type …
template <typename T, typename Accumulator>
struct Adding : OneByOne<T> {
    typedef Accumulator Column;
};

// … except for small integers: a column's sum fits 32 bits, one instruction adds a whole word, and the order does not
// matter. (Inline assembly, because the compiler's fast modes lack the intrinsics.)
template <typename T, typename Word>
struct AddingWords {
    typedef T Value;
    typedef Word Loaded;
    typedef Word Column;
    static constexpr int PER_WORD = sizeof(Word) / sizeof(T);
    static constexpr int BLOCKS = 0;
};
#define ADDING_WORDS(T, ACCUMULATOR, WORD, INSTRUCTION, ONES)                                              \
    template <>                                                                                            \
    struct Adding<T, ACCUMULATOR> : AddingWords<T, WORD> {                                                 \
        static __device__ WORD add_word(WORD column, WORD word) {                                          \
            asm(INSTRUCTION " %0, %1, %2, %0;" : "+r"(column) : "r"(word), "r"(ONES));                     \
            return column;                                                                                 \
        }                                                                                                  \
    };
ADDING_WORDS(signed char, long long, int, "dp4a.s32.s32", 0x01010101)
ADDING_WORDS(short, long long, int, "dp2a.lo.s32.s32", 0x0101)
ADDING_WORDS(unsigned char, unsigned long long, unsigned, "dp4a.u32.u32", 0x01010101)
ADDING_WORDS(unsigned short, unsigned long long, unsigned, "dp2a.lo.u32.u32", 0x0101)
#undef ADDING_WORDS

template <typename T, typename Accumulator>
struct Sum : Adding<T, Accumulator> {
    typedef typename Adding<T, Accumulator>::Column Column;
    typedef Accumulator State;
    static __device__ Column start() { return Column(-0.0); }  // -0.0 + x is x, also where x is -0.0
    static __device__ Column add(Column column, T value, int) { return column + static_cast<Column>(value); }
    static __device__ State state(Column column, int, long long, int) { return column; }
    static __device__ State none() { return State(-0.0); }
    static __device__ State join(State left, State right) { return left + right; }
};

template <typename T>
struct Bounds;  // the largest value, and the smallest

#define BOUNDS(T, LOW, HIGH)                                   \
    template <>                                                \
    struct Bounds<T> {                                         \
        static __device__ constexpr T low() { return LOW; }    \
        static __device__ constexpr T high() { return HIGH; }  \
    };
BOUNDS(signed char, -128, 127)
BOUNDS(unsigned char, 0, 255)
BOUNDS(short, -32768, 32767)
BOUNDS(unsigned short, 0, 65535)
BOUNDS(int, -2147483647 - 1, 2147483647)
BOUNDS(unsigned, 0, 4294967295u)
BOUNDS(long long, -9223372036854775807ll - 1, 9223372036854775807ll)
BOUNDS(unsigned long long, 0, 18446744073709551615ull)
BOUNDS(float, -__int_as_float(0x7f800000), __int_as_float(0x7f800000))
BOUNDS(double, -__longlong_as_double(0x7ff0000000000000ll), __longlong_as_double(0x7ff0000000000000ll))
#undef BOUNDS

// A NaN wins over every number. Of two zeros the first stays.
template <typename T>
struct Min : OneByOne<T> {
    typedef T Column;
    typedef T State;
    static __device__ State none() { return Bounds<T>::high(); }
    static __device__ State join(State left, State right) { return right < left || is_nan(right) ? right : left; }
    static __device__ Column start() { return none(); }
    static __device__ Column add(Column column, T value, int) { return join(column, value); }
    static __device__ State state(Column column, int, long long, int) { return column; }
};

template <typename T>
struct Max : OneByOne<T> {
    typedef T Column;
    typedef T State;
    static __device__ State none() { return Bounds<T>::low(); }
    static __device__ State join(State left, State right) { return right > left || is_nan(right) ? right : left; }
    static __device__ Column start() { return none(); }
    static __device__ Column add(Column column, T value, int) { return join(column, value); }
    static __device__ State state(Column column, int, long long, int) { return column; }
};

// Maps a value to an integer of the same order; all NaNs map to the largest.
template <typename T>
__device__ inline unsigned long long key_of(T value) {
    constexpr unsigned long long SIGN = 1ull << 63;
    if constexpr (T(0.5) != T(0)) {
        if (is_nan(value)) return ~0ull;
        const unsigned long long bits = __double_as_longlong(value == 0 ? 0.0 : static_cast<double>(value));
        return bits & SIGN ? ~bits : bits | SIGN;
    } else {
        return T(-1) < T(0) ? static_cast<unsigned long long>(static_cast<long long>(value)) ^ SIGN : value;
    }
}

struct Largest {
    unsigned long long key;
    long long index;  // -1: none yet
};

__device__ inline Largest larger_of(const Largest& left, const Largest& right) {
    if (right.index < 0 || (left.index >= 0 && left.key > right.key)) return left;
    if (left.index < 0 || right.key > left.key) return right;
    return left.index < right.index ? left : right;
}

// The first index of the largest value; a NaN counts as larger than any number.
template <typename T>
struct ArgMax : OneByOne<T> {
    struct Column {
        T value;
        int row;
    };
    typedef Largest State;
    // The start value is the minimum, so row 0 is right if no other value is larger.
    static __device__ Column start() { return {Bounds<T>::low(), 0}; }
    static __device__ Column add(Column column, T value, int row) {
        const bool larger = !(value <= column.value) && !is_nan(column.value);
        return {larger ? value : column.value, larger ? row : column.row};
    }
    static __device__ State state(Column column, int, long long first, int step) {
        return {key_of(column.value), first + static_cast<long long>(column.row) * step};
    }
    static __device__ State none() { return {0, -1}; }
    static __device__ State join(State left, State right) { return larger_of(left, right); }
};

struct MomentsState {
    double count, mean, squares;  // squares: the sum of squared differences from the mean
};

__constant__ double RECIPROCAL[ROWS] = {1.0 / 1,  1.0 / 2,  1.0 / 3,  1.0 / 4,  1.0 / 5,  1.0 / 6,  1.0 / 7,  1.0 / 8,
                                        1.0 / 9,  1.0 / 10, 1.0 / 11, 1.0 / 12, 1.0 / 13, 1.0 / 14, 1.0 / 15, 1.0 / 16};

// Welford's updates along a column, Chan's between columns.
template <typename T>
struct Moments : OneByOne<T> {
    // By default the compiler uses 48 registers and keeps fewer loads in flight: 0.73 of reading, and 0.98 with 64 (H200,
    // float32). Smaller values have more columns, which would spill.
    static constexpr int BLOCKS = sizeof(T) < 4 ? 0 : 4;
    struct Column {
        double mean, squares;
    };
    typedef MomentsState State;
    static __device__ Column start() { return {0, 0}; }
    static __device__ Column add(Column column, T value, int row) {
        const double x = static_cast<double>(value), difference = x - column.mean;
        const double mean = column.mean + difference * RECIPROCAL[row];
        return {mean, column.squares + difference * (x - mean)};
    }
    static __device__ State state(Column column, int rows, long long, int) {
        return {static_cast<double>(rows), column.mean, column.squares};
    }
    static __device__ State none() { return {0, 0, 0}; }
    static __device__ State join(State left, State right) {
        if (right.count == 0) return left;
        if (left.count == 0) return right;
        const double count = left.count + right.count, difference = right.mean - left.mean;
        // Most joins have equal counts, and a division costs as much as several values.
        const double share = left.count == right.count ? 0.5 : right.count / count;
        return {count, left.mean + difference * share,
                left.squares + right.squares + difference * difference * (left.count * share)};
    }
};

// Partial results of an operation as the input of the next launch.
template <typename Operation>
struct Partials : OneByOne<typename Operation::State> {
    typedef typename Operation::State Column;
    typedef typename Operation::State State;
    static __device__ Column start() { return Operation::none(); }
    static __device__ Column add(Column column, const State& value, int) { return Operation::join(column, value); }
    static __device__ State state(Column column, int, long long, int) { return column; }
    static __device__ State none() { return Operation::none(); }
    static __device__ State join(State left, State right) { return Operation::join(left, right); }
};
