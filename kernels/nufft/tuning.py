"""Constants chosen by measurement. They change time and memory, and with `method="auto"` the method."""

from __future__ import annotations

# CUDA, one H200. Cost model of one call, for method "auto": pairs per second of the exact product by number of terms;
# the fixed cost of a call of each method, and of gridding's if a CUDA graph launches it; and the cost of gridding per
# sample (by number of axes) and per cell.
EXACT_PAIRS_A_S = {1: 7e13, 3: 3.2e13}
EXACT_CALL_S, GRIDDING_CALL_S, GRIDDING_GRAPH_S = 1.35e-4, 8e-5, 2.1e-5
GRIDDING_SAMPLE_S, GRIDDING_CELL_S = {2: 1.4e-11, 3: 1.6e-10}, 1.3e-11
# Exact transform: bytes of the table of cosines and sines made at a time (about the L2 cache), and of partial sums.
TABLE_BYTES, SLOT_BYTES = 64 << 20, 512 << 20
# Gridding: candidates one warp takes, at least, and as a multiple of the mean; samples one block takes.
SPREAD_PART, MEAN_PARTS, REGION_PART = 256, 4, 512
# Cells of the grids of all coils computed together, 4 GiB; values between the passes of our own FFTs, 2 GiB.
MAX_CELLS_AT_ONCE, MAX_WORK = 1 << 29, 1 << 28
# Cells of all coils up to which calls with the same arrays are launched as a CUDA graph, whose memory stays allocated.
MAX_CAPTURED_CELLS = 1 << 22

# CPU, an AMD EPYC 7003.
VALUES_A_THREAD = 20_000  # with fewer, FINUFFT's threads cost more than they save
EXACT_PAIRS = 1 << 15  # pairs of sample and pixel up to which the exact sum costs less than planning FINUFFT
PART_BYTES = 1 << 22  # factors of the exact transform computed at a time, for one coil: about a core's cache
