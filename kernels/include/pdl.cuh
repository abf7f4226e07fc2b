// Kernels whose blocks come in while those of the kernel before them finish (`early` of kernels/runtime/launch.py; sm_90 on): what
// a block works out for itself, and the way to its multiprocessor, then cost no time (2 us of each of several launches in
// a row on an H200).
#pragma once

// Waits until all that the stream did before is done and seen. Every thread of a kernel that is launched early calls this
// before it touches memory, and the next kernel's blocks may come in once all blocks have.
__device__ __forceinline__ void await_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
