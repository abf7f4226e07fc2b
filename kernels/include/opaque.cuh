// Numbers that stay in registers.
#pragma once

// Keeps the compiler from computing a thread's constant again and again, for want of a register.
template <typename Value>
__device__ inline Value kept(Value value) {
    if constexpr (sizeof(Value) == 8) asm volatile("" : "+l"(value));
    else asm volatile("" : "+r"(value));
    return value;
}
