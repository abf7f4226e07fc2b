"""How a job of a service is shown: a bar on a terminal; in a notebook its progress, and then its preview."""

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
    progress = ""
    if view["state"] in ("planning", "running") and view["chunks"]:
        done, total = int(view["chunks_done"]), int(view["chunks"])
        progress = f' <progress max="{total}" value="{done}"></progress> {done:,} of {total:,} chunks'
    error = f"<br>{escape(view['error'])}" if view["error"] else ""
    source = "" if preview is None else f"data:image/png;base64,{base64.b64encode(preview).decode()}"
    picture = f'<br><img alt="preview of the result" style="max-width: 100%" src="{source}">' if source else ""
    return (
        f"<div><b>{escape(view['workload'])}</b> {escape(view['input'])} → {escape(view['output'])}: "
        f"{escape(view['state'])}{progress}{error}{picture}</div>"
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


@contextmanager
def bar(title: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar; call what this yields with the data of each `progress` event."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    name = Column(no_wrap=True, max_width=console.width // 3)  # leave room for the other columns
    columns = (
        TextColumn("{task.description}", markup=False, table_column=name), BarColumn(), MofNCompleteColumn(),
        TextColumn("chunks,"), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, state="queued")

        def show(data: Mapping[str, Any]) -> None:
            progress.update(task, completed=data["chunks_done"], total=data["chunks"], state=data["state"])

        yield show
