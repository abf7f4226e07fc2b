"""A few damaged files of every format, always the same; `python -m tests.pipeline.formats.fuzz` searches for more."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from tests import commands
from tests.pipeline.formats import fuzz

SEED = 20


@pytest.mark.slow
def test_damaged_files_end_in_one_line():
    """In a process without threads: each file is read in a fork."""
    found = commands.run(
        [sys.executable, "-m", "tests.pipeline.formats.fuzz", "--cases", "2", "--seed", str(SEED)],
        capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert re.search(rf"^{2 * len(fuzz.KINDS)} files, 0 faults$", found.stdout, re.MULTILINE), found.stdout


READS = {
    "pass": None,
    "raise fuzz.MillraceError('in.npy: truncated')": None,
    "raise fuzz.MillraceError('truncated')": "not one line that names the file",
    "raise fuzz.MillraceError('in.npy: \\ntruncated')": "not one line that names the file",
    "raise KeyError('shape')": "KeyError: 'shape'",
    "os.abort()": "SIGABRT",
    "bytearray(1 << 30)": "MemoryError",
    "time.sleep(60)": "no answer within 1 s",
}


def test_what_counts_as_a_fault():
    script = (
        "import json, os, sys, time\nfrom pathlib import Path\nfrom tests.pipeline.formats import fuzz\n"
        "found = []\n"
        "for read in json.loads(sys.argv[1]):\n"
        "    fuzz.MOST_S = 1.0 if 'sleep' in read else 60.0\n"
        "    found.append(fuzz.fault_of(lambda path: exec(read), Path('in.npy')))\n"
        "print(json.dumps(found))"
    )
    found = commands.run(
        [sys.executable, "-c", script, json.dumps([*READS])], capture_output=True, text=True,
        cwd=Path(__file__).parents[3], check=True,
    )  # fmt: skip
    for said, (read, expected) in zip(json.loads(found.stdout), READS.items(), strict=True):
        assert said is None if expected is None else expected in said, (read, said)


def test_damage_is_the_same_for_a_seed_and_changes_something():
    good = bytes(range(256)) * 9
    made = [fuzz.damage(good, random.Random(seed)) for seed in range(200)]
    assert made == [fuzz.damage(good, random.Random(seed)) for seed in range(200)]
    assert sum(each != good for each in made) > 190
    assert len({len(each) for each in made}) > 20
    assert fuzz.damage(b"", random.Random(1)) is not None
