// Programmatic dependent launch (`dependent_launch` of kernels/runtime/launch.py; sm_90 on): blocks start while the previous
// kernel finishes, which hides their launch and their set-up (2 us of each of several launches in a row on an H200).
#pragma once

// Waits until all earlier work of the stream is complete and visible, then lets the next kernel's blocks start once every
// block has come this far. Every thread of a dependent launch calls this before it touches memory.
__device__ __forceinline__ void grid_dependency_synchronize() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
