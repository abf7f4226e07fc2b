// Convolution of lines and images with small masks, and convolution layers; the contract is in
// kernels/classic/convolution/__init__.py.
//
// Samples are float, contiguous: a line [n], an image [rows][columns], with zeros beyond; of a layer, images
// [image][channel][row][column] and filters [map][channel][row][column], without anything beyond. Masks come as a launch's
// parameters, which lie in constant memory, already turned round.
//
// Floors for P results of masks of K numbers, on a device that moves W bytes and does F multiply-adds a second:
//   bytes       8 P / W
//   operations  K P / F             (H200: the larger of the two from K = 54 on)
//   layer       maps × channels × K multiply-adds a pixel / F
//
// Of lines and of images, naive to fast (lines.cuh, images.cuh):
//   direct      one thread per result, mask and samples from global memory
//   constant    the mask from constant memory: one read for a whole warp
//   steps       strategy 1: one thread per result, tile and halo loaded into shared memory in several steps
//   inputs      strategy 2: one thread per sample, loaded in one step; those at the rim compute nothing
//   inner       strategy 3: only the inner tile in shared memory, the halo from the caches
//   registers   a thread eight results of a line, or 4 × 4 of an image: a sample read serves several multiply-adds
// Of layers (layers.cuh):
//   layer_direct  one thread per result
//   layer_gemm    a matrix product whose right side is gathered from the images while it is staged
// Sources: Hwu, Kirk and El Hajj, "Programming Massively Parallel Processors", chapters 7 and 16; Chellapilla et al., "High
// performance convolutional neural networks for document processing", 2006.

#include "lines.cuh"

#include "images.cuh"
#include "layers.cuh"
