"""The entry point: Ctrl-C prints one line even while the command is still loading."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from pipeline.stopping import Stopped, held, no_more, raise_on_signals


def main() -> NoReturn:
    """Runs `pipeline.cli.main`; handles only the signals that arrive before it does so itself."""
    raise_on_signals()
    if sys.argv[1:2] == ["run"]:
        gc.set_threshold(50_000)  # as modules load, nothing is garbage: looking for it takes a twentieth of the start
    try:
        with held():
            from pipeline import cli

        cli.main()
    except Stopped as stop:
        sys.stderr.write(f"millrace: {stop}\n")
        sys.exit(128 + stop.signal)
    finally:
        no_more()
        gc.freeze()  # the process is ending: skip the final garbage collection


if __name__ == "__main__":
    main()
