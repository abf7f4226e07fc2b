// The exact transform: every sample with every pixel.
//
// Floors for P pairs (pixels × samples × coils): 4 P operations over the tensor cores' rate with one fp16 term, 12 P with
// three; on the special-function unit, 2 P sines and cosines over its rate.
//
// Adjoint, naive to fast:
//   exact_scatter          a thread a sample, atomic additions to every point            (exact_ladder.cuh)
//   exact_gather           a thread a point: loop fission (exact_weigh) and interchange
//   exact_registers        the sum in registers
//   exact_constant         samples from constant memory
//   exact_structures       a sample's numbers side by side
//   exact_coarsened<false> eight points a thread
//   exact_coarsened<true>  sines and cosines by the special-function unit
//   exact_staged           samples by way of shared memory, all in one launch; forward: exact_forward_staged
//   exact_adjoint_product  one matrix product on tensor cores                            (exact_adjoint.cuh)
// Forward: exact_forward_product                                                         (exact_forward.cuh)
#pragma once

#include "exact/adjoint.cuh"
#include "exact/forward.cuh"
#include "exact/pairs.cuh"
