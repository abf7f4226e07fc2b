// One or more steps of a 7-point stencil on a field; the contract is in kernels/classic/stencil/__init__.py.
//
// The field is float [z][y][x], contiguous. A point inside becomes centre × itself + neighbour × (the sum of its six
// neighbours); a point on the border does not change. Additions and products are rounded individually in one order
// (`stepped`), so that every kernel gives the same bits.
//
// Floors for P points on a device that moves W bytes a second:
//   one step    8 P / W     each point read once and written once
//   s steps     8 P / W in a single pass; 8 operations per point and step at the float32 rate
//
// Kernels, naive to fast:
//   naive           one thread per point, seven reads                                                 (points.cuh)
//   pencil          one thread per column along z: indices computed once, neighbours in the caches
//   register_queue  the three points of the column move through registers: five reads
//   shared_plane    the plane's neighbours from shared memory: one read per point, and the tile's rim
//   vectors         128 points of a row per warp: 16 bytes per read, neighbours along x by shuffles   (vectors.cuh)
//   temporal        two or four steps in one pass over memory: planes of every step in registers and shared memory
// Sources: Micikevicius, "3D finite difference computation on GPUs using CUDA", GPGPU-2, 2009; Nguyen et al., "3.5-D
// blocking optimization for stencil computations", SC 2010; Parboil's stencil.

#include "points.cuh"

#include "vectors.cuh"
