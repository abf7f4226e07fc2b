"""Which of a file's frames or slices count, as a parameter says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import ParameterError

_RANGE = re.compile(r"(?P<one>-?\d{1,18})|(?P<begin>-?\d{1,18})?:(?P<step>-?\d{1,18})?:(?P<end>-?\d{1,18})?")


@dataclass(frozen=True)
class IndexRange:
    """`begin:step:end` stands for Python's slice [begin:end:step] with a step above 0, one number for itself alone.

    Numbers count from 0 and `end` is not included; -1 is the last. 100:10:500 takes 100, 110, … 490; :10: every tenth;
    -100:: the last hundred; 7 the eighth alone. Where a slice would be cut or empty, it is refused.
    """

    begin: int | None = None
    step: int = 1
    end: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError, of one line, where the text is no such range."""
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"'{text}' is no range: write begin:step:end, as 100:10:500 for 100, 110, … 490, "
                ":10: for every tenth, or one number"
            )
        if found["one"] is not None:
            only = int(found["one"])
            return cls(only, 1, only + 1 or None)
        begin, step, end = (None if found[name] is None else int(found[name]) for name in ("begin", "step", "end"))
        if step is not None and step < 1:
            raise ValueError(f"'{text}' has the step {step}: begin:step:end needs a step of at least 1")
        between = None if begin is None or end is None or (begin < 0) != (end < 0) else end - begin
        if step is not None and between is not None and 0 < between < step:
            # As if written begin:end:step: one would be taken where many are meant.
            raise ValueError(
                f"'{text}' steps by {step} from {begin} to {end}: the order is begin:step:end, "
                "the step in the middle; for one alone give its number"
            )
        return cls(begin, step or 1, end)

    def of(self, count: int, option: str, path: Path) -> range:
        """Those chosen of so many. ParameterError where there are none, or the range reaches beyond them.

        option, path : for the message: what chooses, and what is chosen from
        """
        chosen = range(count)[slice(self.begin, self.end, self.step)]
        begin, end = self.begin or 0, self.end or 0
        if begin < -count or end > count or not chosen:
            raise ParameterError(
                f"{option} {self}: chooses {'more than there are' if chosen else 'none'}; {path} has {count:,}, "
                f"numbered 0 to {count - 1}, or from the end -1 to -{count}"
            )
        return chosen

    def __str__(self) -> str:
        if self.begin is not None and self.step == 1 and (self.begin + 1 or None) == self.end:
            return str(self.begin)
        begin, end = ("" if value is None else str(value) for value in (self.begin, self.end))
        return f"{begin}:{self.step}:{end}"
