// Numbers that stay in registers.
#pragma once

// Hides how a number was computed, so that the compiler keeps it in a register instead of computing it again at each use.
template <typename Value>
__device__ inline Value opaque(Value value) {
    if constexpr (sizeof(Value) == 8) asm volatile("" : "+l"(value));
    else asm volatile("" : "+r"(value));
    return value;
}
