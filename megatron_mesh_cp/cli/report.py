"""How `mesh-cp` shows figures to people: sizes and times with their units, and on stderr what is being done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int], None]  # done, of how many


def size(count: float) -> str:
    """Bytes with three digits or more, in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:,.{2 if count < 10 else 1}f} {unit}"


def limit(count: int, space: str = " ") -> str:
    """Bytes in decimal units, rounded up at the fourth digit: what --memory-limit takes, and then what fits it."""
    unit, factor = next(((u, f) for u, f in (("B", 1), ("KB", 10**3), ("MB", 10**6)) if count < 999 * f), ("GB", 10**9))
    digits = 0 if unit == "B" else 3 if count < 10 * factor else 2 if count < 100 * factor else 1
    whole, rest = divmod(-(-count * 10**digits // factor), 10**digits)
    return f"{whole}{f'.{rest:0{digits}d}' if digits else ''}{space}{unit}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with three digits or more; '-' where there are none."""
    if seconds is None:
        return "-"
    ms = 1e3 * seconds
    return f"{ms:.4f}" if ms < 0.1 else f"{ms:.3f}" if ms < 100 else f"{ms:,.1f}"


def share(part: float | None, whole: float | None) -> str:
    """A part in per cent of the whole; '-' where one is not known."""
    return "-" if part is None or not whole else f"{part / whole:.1%}"


def new_table(title: str, columns: dict[str, str], caption: str | None = None) -> Table:
    """A table in the style of all commands. columns: heading -> "left" or "right"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for heading, justify in columns.items():
        out.add_column(heading, justify=justify, no_wrap=justify == "right")
    return out


def console() -> Console:
    """Stdout for tables: as wide as the terminal, or as wide as a table needs where a file or a pipe takes it."""
    from rich.console import Console

    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=120)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Says on stderr, where that is a terminal, what is being done, until it is."""
    from rich.console import Console

    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield
        return
    with stderr.status(what):
        yield


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Yields the function to call with (done, total). The bar is on stderr, where that is a terminal, and goes away."""
    from rich.console import Console

    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
