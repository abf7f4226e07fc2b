// Breadth-first search: the level of each vertex; the contract is in kernels/classic/bfs/__init__.py.
//
// The graph is in compressed rows: offsets [n + 1] int64, columns [m] int32. Levels are int32, -1 for unreachable vertices.
// Algorithm: level by level; the vertices of a level are the frontier. Threads race to reach a vertex, but the level does
// not depend on the winner.
//
// Floor for a search that reaches all vertices: 4 m bytes of columns, 8 n of offsets and 4 n of levels over bandwidth.
// Top-down, every edge out of a reached vertex is read; bottom-up, a vertex stops at its first parent, so a
// direction-optimising search may read far fewer than m edges.
//
// Kernels, naive to fast:
//   expand_global        one thread per frontier vertex, one queue for all (queues.cuh)
//   expand_block         each block's queue in shared memory first
//   expand_hierarchical  queues of a few lanes, then the block's, then the global one
//   expand_chunks        a block's threads share its edges evenly, long rows in pieces; visited vertices are bits (chunks.cuh)
//   search_small         a cluster of blocks searches successive small levels without the host
//   expand_bottom_up     one thread per unvisited vertex, which looks for one parent in the frontier (bottom_up.cuh)
// Sources: Luo, Wong, Hwu, "An effective GPU implementation of breadth-first search" (2010); Merrill, Garland, Grimshaw,
// "Scalable GPU graph traversal" (2012); Beamer, Asanović, Patterson, "Direction-optimizing breadth-first search" (2012).

#include "queues.cuh"

#include "chunks.cuh"

#include "bottom_up.cuh"
