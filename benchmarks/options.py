"""Shared command-line options of the benchmarks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


class Options(argparse.ArgumentParser):
    """The parser of `scripts/bench NAME`; its help is the module's docstring."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"scripts/bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def add_rounds(self, repeats: int = 5) -> None:
        """Options of interleaved rounds, on the CPU or a GPU."""
        self.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        self.add_argument("--repeats", type=int, default=repeats, help=f"rounds that are timed [default: {repeats}]")

    def add_rows(self) -> None:
        """Options of benchmarks that print a table, measured row by row."""
        cores = len(os.sched_getaffinity(0))
        self.add_argument("--workers", type=int, default=cores, help=f"CPU threads [default: {cores}]")
        self.add_argument("--only", default="", help="only the rows whose name contains this")
        self.add_json()

    def add_parts(self, parts: Collection[str], default: Collection[str]) -> None:
        """Positional arguments that select the measurements by name."""

        def known(name: str) -> str:  # `choices` would compare the whole default with each choice
            if name not in parts:
                raise argparse.ArgumentTypeError(f"there is no '{name}'; there are {', '.join(parts)}")
            return name

        which = f"of {', '.join(parts)} [default: {'all' if len(default) == len(parts) else ', '.join(default)}]"
        self.add_argument("parts", nargs="*", metavar="PART", type=known, default=[*default], help=which)

    def add_json(self) -> None:
        self.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def run_parts(parts: Mapping[str, Callable[[argparse.Namespace], Any]], options: argparse.Namespace) -> None:
    """Measures the parts asked for; prints the figures of each, and writes those so far to the file of --json."""
    results = {}
    for part in options.parts:
        results[part] = parts[part](options)
        print(part, json.dumps(results[part], indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results))
