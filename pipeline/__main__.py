"""The entry point: Ctrl-C prints one line even while the command is still loading."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process without a traceback until it is handled

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

from pipeline.stopping import Stopped, held, no_more, raise_on_signals


def main() -> NoReturn:
    """Runs `pipeline.cli.main`; handles only the signals that arrive before it does so itself."""
    raise_on_signals()
    if sys.argv[1:2] == ["run"]:
        gc.set_threshold(200_000)  # as modules load, nothing is garbage: looking for it takes a twentieth of the start
    if sys.argv[1:3] == ["run", "smooth"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no matrices are multiplied: NumPy starts no threads
    try:
        with held():
            from pipeline import cli

        cli.main()
    except Stopped as stop:
        sys.stderr.write(f"millrace: {stop}\n")
        _end(128 + stop.signal)
    except SystemExit as end:
        _end(end.code)
    finally:
        no_more()


def _end(code: Any) -> NoReturn:
    """Ends the process without taking its modules apart, except those of GPUs and of Dask."""
    no_more()
    gc.freeze()  # skip the final garbage collection
    if isinstance(code, int) and not {"cupy", "distributed"} & sys.modules.keys():
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
