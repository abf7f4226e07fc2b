"""Sizes chosen by measurement. They change the time a map takes; of them the cells' edges alone can change its bits.

cuda/ holds the sizes that .cuh files declare too.
"""

from __future__ import annotations

# CUDA, one H200.
THREADS = 256
OVERFLOW_BLOCKS = 4096

# Both devices. Cells per cutoff along x, y, z: cubes of 4 Å at the default cutoff, 6.4 atoms of water each; or thin
# slices of them, which are free for code that visits cells by columns, and leave fewer atoms to test at both ends.
CUBES, SLICES = (3, 3, 3), (3, 3, 12)
# An edge spans at least this many points divided by its cells per cutoff: never many more cells than points.
POINTS_A_CUTOFF = 12

# CPU, one core of an AMD EPYC 7003. Rows of a block, x × y: the sums that an atom reaches stay in the core's cache, and
# its distances along z serve many rows.
CUTOFF_BLOCK_ROWS = (16, 16)
DIRECT_BLOCK_ROWS = (8, 8)
DIRECT_BLOCK_POINTS = 512  # along z
MOST_BLOCK_PAIRS = 1 << 32  # 2 s on a core: cancellation is checked between blocks
MIN_BLOCKS_A_WORKER = 12
