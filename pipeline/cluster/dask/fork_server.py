"""The process that worker processes are forked from: it has imported all they need, so that a worker starts, or is back
after its death, in a fraction of the seconds that the imports take. It has one thread and never touches CUDA."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from collections.abc import Sequence

METHOD = "forkserver"


def begin(modules: Sequence[str] = ()) -> None:
    """Start it, once a program. Its imports go on beside this process's own: the sooner the better.

    modules : what it imports besides, where it can be imported
    """
    multiprocessing.get_context(METHOD).set_forkserver_preload(["pipeline.cluster.dask.worker_imports", *modules])
    # Ctrl-C and a closed terminal come to every process of its job: this one answers and ends the others, which are not
    # told. (The tracker ignores Ctrl-C by itself, but lets it through again here.)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
