"""Figures tuned for one architecture: all measured on an H200 (sm_90). No result depends on them.

Tile shapes, and the blocks that registers allow, are fixed in the headers and repeated beside each launch.
"""

from __future__ import annotations

from typing import Any

# block_partition: how much longer than the others the last piece of a line takes, as a share of its time.
TAIL = 0.25

# fused: bands are mostly short if the kernel waits for memory and each resident block has at least this many rows.
# Otherwise they are factored, by these shares: for windows that reach up to 4 samples, of floats and of others, and for
# those that reach farther.
FUSED_SHORT_FROM_ROWS = 400
FUSED_FLOAT_SHARE, FUSED_SHARE, FUSED_FAR_SHARE = 0.35, 0.55, 0.6

# wide: the share of the remaining work that one round of resident blocks takes.
WIDE_SHARE = 0.6

# tensor: chunks that a block could have written before its first.
TENSOR_START_CHUNKS = 4

# words: the same; the tail of its strips (see TAIL).
WORDS_START_CHUNKS, WORDS_TAIL = 3, 0.5

# tree: rows that a block could have filtered before its first; the tail of its bands (see TAIL).
TREE_START_ROWS = 32
TREE_TAIL = 0.05

# running: the shapes of box_column_sums by channels, and of box_running by bytes of a sample and channels, each the
# fastest of those that fit registers. Across more than `most_taps` samples box_running is faster, since it sums no
# columns beside its results.
RUNNING_COLUMNS = {
    1: {"words": 13, "most_taps": 255},
    2: {"words": 15, "most_taps": 150},
    3: {"words": 15, "most_taps": 45},
    4: {"words": 21, "teams": 12, "most_taps": 70},
}
RUNNING_WINDOWS = {
    (1, 2): {"words": 15},
    (1, 3): {"words": 15},
    (1, 4): {"words": 17},
    (2, 1): {"words": 9, "rows": 2},
    (2, 2): {"words": 9, "rows": 2},
    (2, 3): {"words": 9, "rows": 2},
    (2, 4): {"words": 18},
}
RUNNING_EDGE_COST = 1.15  # of a row at the left or right edge, over one inside
RUNNING_START_ROWS = 48  # that a block could have filtered while it waits for its first

# sweep: the shapes of box_sweep by bytes of a sample and channels, and what a sample costs compared with the last one,
# which also fits wider windows.
SWEEP: dict[tuple[int, int], list[dict[str, Any]]] = {
    (1, 1): [{"words": 7, "threads": 384, "rows": 2, "whole": True, "cost": 0.7}, {"words": 7, "threads": 512}],
    (1, 2): [{"words": 9, "threads": 384, "rows": 2, "whole": True, "cost": 0.7}, {"words": 7, "threads": 512}],
    (1, 3): [{"words": 9, "threads": 384, "rows": 2, "whole": True, "cost": 0.7}, {"words": 9, "threads": 512}],
    (1, 4): [{"words": 9, "threads": 384, "rows": 2, "whole": True, "cost": 0.7}, {"words": 7, "threads": 512}],
    (2, 1): [{"words": 9, "threads": 512, "rows": 2, "cost": 0.95}, {"words": 9, "threads": 768}],
    (2, 2): [{"words": 9, "threads": 512, "rows": 2, "cost": 0.95}, {"words": 9, "threads": 768}],
    (2, 3): [{"words": 15, "threads": 512}],
    (2, 4): [{"words": 18, "threads": 512, "cost": 0.933}, {"words": 10, "threads": 512}],
}
