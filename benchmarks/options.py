"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from pathlib import Path


class Options(argparse.ArgumentParser):
    """Of `scripts/bench NAME`; its help is the module's docstring, line by line."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"scripts/bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def add_rounds(self, repeats: int = 5) -> None:
        """Of rivals, here or on a GPU."""
        self.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        self.add_argument("--repeats", type=int, default=repeats, help=f"rounds that are timed [default: {repeats}]")

    def add_rows(self) -> None:
        """Of a table, each with rounds of its own."""
        cores = len(os.sched_getaffinity(0))
        self.add_argument("--workers", type=int, default=cores, help=f"CPU threads [default: {cores}]")
        self.add_argument("--only", default="", help="only the rows whose name contains this")
        self.add_json()

    def add_parts(self, parts: Collection[str], default: Collection[str]) -> None:
        """Which measurements to make, by name."""

        def known(name: str) -> str:  # for `choices` would compare the whole default with each of them
            if name not in parts:
                raise argparse.ArgumentTypeError(f"there is no '{name}'; there are {', '.join(parts)}")
            return name

        which = f"of {', '.join(parts)} [default: {'all' if len(default) == len(parts) else ', '.join(default)}]"
        self.add_argument("parts", nargs="*", metavar="PART", type=known, default=[*default], help=which)

    def add_json(self) -> None:
        self.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
