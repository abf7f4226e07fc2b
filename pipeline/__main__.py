"""The way in: Ctrl-C and its kin are told in one line from the first moment on, while the command is loaded too."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from pipeline.stopping import Stopped, held, no_more, raise_on_signals


def main() -> NoReturn:
    """`pipeline.cli.main`, which says what ends it; this takes what comes before it listens."""
    raise_on_signals()
    try:
        with held():
            from pipeline import cli

        cli.main()
    except Stopped as stop:
        sys.stderr.write(f"millrace: {stop}\n")
        sys.exit(128 + stop.signal)
    finally:
        no_more()
        gc.freeze()  # all there is goes with the process: it need not be searched for garbage first


if __name__ == "__main__":
    main()
