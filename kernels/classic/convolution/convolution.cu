// Convolution of lines and images with small masks, and convolution layers; the contract is in
// kernels/classic/convolution/__init__.py.
//
// Samples are float, contiguous: a line [n] or an image [rows][columns], with zeros beyond; for layers, images
// [image][channel][row][column] and filters [map][channel][row][column], without padding. Masks are passed flipped, as
// launch parameters, which lie in constant memory.
//
// Floors for P results of masks of K numbers, on a device that moves W bytes and does F multiply-adds a second:
//   bytes       8 P / W
//   operations  K P / F             (H200: the larger of the two from K = 54 on)
//   layer       maps × channels × K multiply-adds per pixel / F
//
// Lines and images, naive to fast (lines.cuh, images.cuh):
//   direct      one thread per result, mask and samples from global memory
//   constant    the mask from constant memory: one read per warp
//   steps       strategy 1: one thread per result, tile and halo loaded into shared memory in several steps
//   inputs      strategy 2: one thread per sample, loaded in one step; threads of the halo compute nothing
//   inner       strategy 3: only the inner tile in shared memory, the halo from the caches
//   registers   eight results of a line, or 4 × 4 of an image, per thread: a read serves several multiply-adds
// Layers (layers.cuh):
//   layer_direct  one thread per result
//   layer_gemm    a matrix product whose right matrix is gathered from the images while it is copied to shared memory
// Sources: Hwu, Kirk and El Hajj, "Programming Massively Parallel Processors", chapters 7 and 16; Chellapilla et al., "High
// performance convolutional neural networks for document processing", 2006.

#include "lines.cuh"

#include "images.cuh"
#include "layers.cuh"
