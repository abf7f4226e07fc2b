"""The record of the last run of the GPU tests, and whether it speaks of the code in this tree.

python tests/gpu_record.py run [pytest arguments]   runs the tests marked gpu or multi_gpu and writes the record; what
                                                    fails beside others is run again alone, and named there; so is
                                                    whether ranks shared a GPU. If arguments may leave tests out
                                                    (-k, -x, a path), no record is written
python tests/gpu_record.py check [--strict]         one line: does the record match the tree? Exit 1 only if --strict
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu-record.json"
# What runs on a GPU: a change here makes a record stale.
FOLDERS = ("kernels", "pipeline/engine", "pipeline/cluster")
SUFFIXES = (".py", ".cu", ".cuh")
_ALONE = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider")
# What decides how tests are run and shown, and never which: with a value of their own, without, and in one word.
_VALUED = {
    "-n", "--numprocesses", "--maxprocesses", "--dist", "-p", "-r", "-W", "--tb", "--color", "--capture", "--durations",
    "--durations-min", "--verbosity",
}  # fmt: skip
_PLAIN = {"--quiet", "--verbose", "--showlocals", "--no-header", "--no-summary"}
_SHORT = re.compile(r"-[qvsl]+|-[nprW].+")
_MARKED = re.compile(r"\bmark\.(multi_)?gpu\b")


def tree_hash() -> str:
    """SHA-256 over names and contents of the code that the GPU tests test."""
    digest = hashlib.sha256()
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    for name, path in sorted((path.relative_to(ROOT).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class Counts:
    """A pytest plugin that counts tests by outcome; a failed or skipped fixture counts as its test's outcome.

    What fails is named at once: the time on a device may end before the tests do.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            why = str(report.longrepr).strip().splitlines() or [""]
            print(f"\nfailed: {report.nodeid}: {why[-1]}", flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"

    def failed(self) -> list[str]:
        return sorted(name for name, outcome in self.outcomes.items() if outcome == "failed")

    def summary(self) -> dict[str, int]:
        counted = Counter(self.outcomes.values())
        return {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}


def devices() -> dict[str, Any]:
    """Names of the CUDA devices, the driver's version and that of the CUDA runtime; nothing where none answers."""
    try:
        from cupy_backends.cuda.api import runtime

        names = [runtime.getDeviceProperties(index)["name"].decode() for index in range(runtime.getDeviceCount())]
        version = runtime.runtimeGetVersion()
    except Exception as exc:
        return {"devices": [], "reason": str(exc)}
    return {"devices": names, "driver": _driver(), "cuda_runtime": f"{version // 1000}.{version % 1000 // 10}"}


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        return next(word for word in text.split() if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"


def run(arguments: list[str]) -> int:
    import pytest

    found = devices()
    if not found["devices"]:
        print(f"no CUDA device answers ({found['reason']}): nothing was run, and the record stays", file=sys.stderr)
        return 2
    counts = Counts()
    marked = ["-m", "gpu or multi_gpu"]
    status = int(pytest.main([*marked, *arguments, *_files()], plugins=[counts]))
    again = counts.failed()
    if not again and status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print("not every test was run: the record stays", file=sys.stderr)
        return status
    if again:  # some look at time or memory, of which others in parallel take their share
        alone = Counts()
        status = int(pytest.main([*marked, *_ALONE, *again], plugins=[alone]))
        counts.outcomes.update(alone.outcomes)
    if may_select([*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *arguments]):
        print("the arguments may have left tests out: the record stays", file=sys.stderr)
        return status
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
        "ranks": "a GPU each" if len(found["devices"]) > 1 else "several on one GPU",
        **counts.summary(),
        "passed_only_alone": [name for name in again if counts.outcomes[name] == "passed"],
        "arguments": arguments,
        "tree_sha256": tree_hash(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    return status


def may_select(arguments: list[str]) -> bool:
    """Whether pytest may run fewer tests because of these arguments: all but those known not to do that."""
    rest = iter(arguments)
    for argument in rest:
        name, given, _ = argument.partition("=")
        if name in _VALUED:
            if not given:
                next(rest, None)
        elif argument not in _PLAIN and not _SHORT.fullmatch(argument):
            return True
    return False


def _files() -> list[str]:
    """Those with tests that are marked: what the others import need not be there."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if _MARKED.search(path.read_text())]


def check() -> tuple[bool, str]:
    """Whether a run without failures matches the tree, and a line that says so."""
    try:
        record = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return False, "GPU tests: no record of a run (scripts/gpu-test makes one)"
    counts = f"{record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped"
    if alone := record.get("passed_only_alone"):
        counts += f" ({len(alone)} passed only alone)"
    where = ", ".join(record["devices"]) or "no device"
    if ranks := record.get("ranks"):
        where += f" (ranks: {ranks})"
    matches = record["tree_sha256"] == tree_hash()
    verdict = "matches the tree" if matches else "does not match the tree: run scripts/gpu-test again"
    good = matches and record["passed"] > 0 and record["failed"] == 0
    return good, f"GPU tests: {counts} on {where}, {record['date']}; {verdict}"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", *rest]:
            return run(rest)
        case ["check"] | ["check", "--strict"]:
            good, line = check()
            print(line)
            return int("--strict" in arguments and not good)
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
