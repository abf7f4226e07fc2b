"""Which of a file's frames, slices or samples count, as a parameter says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import ParameterError

_NUMBER = r"-?\d{1,18}"
_RANGE = re.compile(rf"(?P<one>{_NUMBER})|(?P<begin>{_NUMBER})?:(?P<end>{_NUMBER})?(?P<third>:(?P<step>{_NUMBER})?)?")


@dataclass(frozen=True)
class IndexRange:
    """`start:stop:step` as in Python's slices, with a step above 0; one number stands for itself alone.

    Numbers count from 0 and `stop` is not included; -1 is the last. 100:500:10 takes 100, 110, … 490; ::10 every tenth;
    -100: the last hundred; 7 the eighth alone. Where a slice would be cut or empty, it is refused.
    """

    begin: int | None = None
    end: int | None = None
    step: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError, of one line, where the text is no such range."""
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"'{text}' is no range: write start:stop:step, as 100:500:10 for 100, 110, … 490, "
                "::10 for every tenth, or one number"
            )
        if found["one"] is not None:
            only = int(found["one"])
            return cls(only, only + 1 or None)
        begin, end, step = (None if found[name] is None else int(found[name]) for name in ("begin", "end", "step"))
        if found["third"] is not None and step is None and end is not None:
            # In the older order, begin:step:end, :10: was every tenth; to Python it is the first ten.
            raise ValueError(
                f"'{text}' is not clear: write ::{end} for a step of {end}, or {begin or ''}:{end} for a stop"
            )
        if step is not None and step < 1:
            raise ValueError(f"'{text}' has the step {step}: start:stop:step needs a step of at least 1")
        between = None if begin is None or end is None or (begin < 0) != (end < 0) else end - begin
        if end is not None and begin is None and end > 0:
            between = end
        if step is not None and between is not None and step > 1 and between < step:
            raise ValueError(_turned(text, step, begin, end))
        return cls(begin, end, step or 1)

    def of(self, count: int, option: str, path: Path) -> range:
        """The chosen indices below `count`. ParameterError if there are none, or if the range ends beyond `count`.

        option, path : for the message: what chooses, and what is chosen from
        """
        chosen = range(count)[slice(self.begin, self.end, self.step)]
        begin, end = self.begin or 0, self.end or 0
        if begin < -count or end > count or not chosen:
            asked = f"{option}{'' if option.endswith('=') else ' '}{self}"
            raise ParameterError(
                f"{asked}: chooses {'more than there are' if chosen else 'none'}; {path} has {count:,}, "
                f"numbered 0 to {count - 1}, or from the end -1 to -{count}"
            )
        return chosen

    def __str__(self) -> str:
        if self.begin is not None and self.step == 1 and (self.begin + 1 or None) == self.end:
            return str(self.begin)
        begin, end = ("" if value is None else str(value) for value in (self.begin, self.end))
        return f"{begin}:{end}" if self.step == 1 else f"{begin}:{end}:{self.step}"


def _turned(text: str, step: int, begin: int | None, end: int | None) -> str:
    first = "" if begin is None else begin
    return (
        f"'{text}' steps by {step} from {first or 0} to {end}: the order is start:stop:step, the step last, as in "
        f"Python: {first}:{step}:{end}; for one alone give its number"
    )
