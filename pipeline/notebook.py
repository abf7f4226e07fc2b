"""A job of a service in a notebook: its progress while it runs, and its preview once it is done."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any


def job_html(view: Mapping[str, Any], preview: bytes | None = None) -> str:
    """A job as HTML that loads nothing: state, input and output, a bar or the error, and the picture.

    view    : the fields of `JobView`
    preview : PNG
    """
    bar = ""
    if view["state"] in ("planning", "running") and view["chunks"]:
        done, total = int(view["chunks_done"]), int(view["chunks"])
        bar = f' <progress max="{total}" value="{done}"></progress> {done:,} of {total:,} chunks'
    error = f"<br>{escape(view['error'])}" if view["error"] else ""
    source = "" if preview is None else f"data:image/png;base64,{base64.b64encode(preview).decode()}"
    picture = f'<br><img alt="preview of the result" style="max-width: 100%" src="{source}">' if source else ""
    return (
        f"<div><b>{escape(view['workload'])}</b> {escape(view['input'])} → {escape(view['output'])}: "
        f"{escape(view['state'])}{bar}{error}{picture}</div>"
    )


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which shows HTML."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return find is not None and hasattr(find(), "kernel")


@contextmanager
def shown(job: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Displays the job, and again in the same place at each `progress` event and at the end."""
    display = sys.modules["IPython"].display.display
    place = display(job, display_id=True)

    def update(data: Mapping[str, Any]) -> None:
        job.view.update(state=data["state"], chunks=data["chunks"], chunks_done=data["chunks_done"])
        place.update(job)

    yield update
    place.update(job)
