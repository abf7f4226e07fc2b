"""The structures that kernels of this folder take by value, mirrored in ctypes, and the constants shared with CUDA."""

from __future__ import annotations

import ctypes

# In adjoint.cuh, forward.cuh and pairs.cuh too.
STAGE, GROUP, TILE_GROUPS, TILE_COLUMNS, ADJOINT_THREADS = 32, 8, 8, 128, 192
BLOCK_GROUPS, FORWARD_WARPS = 4, 8
LADDER_THREADS, COARSE_POINTS, CONSTANT_SAMPLES, STAGED_SAMPLES = 256, 8, 192, 128

NULL = ctypes.c_void_p(0)


class ShapeStruct(ctypes.Structure):
    """struct ExactShape of phases.cuh."""

    _fields_ = (("samples", ctypes.c_longlong), ("coils", ctypes.c_int), ("size", ctypes.c_int * 3))


class AdjointStruct(ctypes.Structure):
    """struct ExactAdjoint of adjoint.cuh."""

    _fields_ = (
        ("samples", ctypes.c_longlong),
        ("stride", ctypes.c_longlong),
        ("first_group", ctypes.c_longlong),
        ("last_group", ctypes.c_longlong),
        ("stages", ctypes.c_longlong),
        ("tiles", ctypes.c_longlong),
        ("groups", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("column_pairs", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("coils", ctypes.c_int),
        ("size", ctypes.c_int * 3),
    )


class ForwardStruct(ctypes.Structure):
    """struct ExactForward of forward.cuh."""

    _fields_ = (
        ("samples", ctypes.c_longlong),
        ("coils", ctypes.c_int),
        ("size", ctypes.c_int * 3),
        ("groups", ctypes.c_int),
        ("along", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("part_steps", ctypes.c_int),
        ("row_parts", ctypes.c_int),
    )


class ArraysStruct(ctypes.Structure):
    """struct SampleArrays of pairs.cuh."""

    _fields_ = (
        *((name, ctypes.c_uint * CONSTANT_SAMPLES) for name in ("kx", "ky", "kz")),
        *((name, ctypes.c_float * CONSTANT_SAMPLES) for name in ("real", "imag")),
    )


class StructuresStruct(ctypes.Structure):
    """struct SampleStructures of pairs.cuh: kx, ky, kz, and the bits of the two floats."""

    _fields_ = (("sample", ctypes.c_uint * 5 * CONSTANT_SAMPLES),)


def blocks_of(count: int, each: int) -> int:
    return -(-count // each)
