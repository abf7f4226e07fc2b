// Merging sorted arrays, and sorting; the contract is in kernels/classic/sort/__init__.py.
//
// Keys are 4 or 8 bytes, compared as unsigned integers: order.cuh maps signed and floating-point keys to them and back.
// Values, if any, are 4 bytes and move with their keys. All sorts and merges are stable.
//
// Floors for n keys of k bytes with values of v, on a device that copies B bytes a second:
//   merge       2 n (k + v) / B
//   merge sort  the same times 1 + ceil(log2(n / 3840)): the tiles, then a pass each time the runs double
//   radix sort  2 n (k + v) / B times k: one pass per byte of the key, and n k / B more to count the digits
// A merge sort of more than 2^17 keys of 4 bytes moves more than a radix sort, which is therefore in production.
//
// Merging, naive to fast (merge.cuh):
//   merge_ranks     one thread per key, placed by its rank in the other array
//   merge_ranges    16 outputs per thread, found by co-ranks
//   merge_tiles     a block's stages of both arrays in shared memory, half of each read again
//   merge_circular  the stages as ring buffers: no key is read again
//   merge_paths     find_corners, then one block per tile, merged in registers
// Sorting: tiles (tiles.cuh) by sort_bitonic or sort_tiles, then passes of one of the above; or radix.cuh.
// Sources: Green, McColl, Bader, "GPU merge path" (2012); Kirk, Hwu, "Programming massively parallel processors", ch. 12;
// Adinets, Merrill, "Onesweep: a faster least significant digit radix sort for GPUs" (2022).

#include "radix.cuh"
#include "tiles.cuh"
