"""Results of scripts/compat.py as a table: for people, and in a Markdown file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

COLUMNS = ("row", "Python", "torch", "megatron-core", "TE", "passed", "failed", "skipped", "seconds", "date")
MARKS = ("<!-- compat: begin -->", "<!-- compat: end -->")


@dataclass(frozen=True)
class Result:
    """What became of a row. ok: None where it could not run. seconds: of environment and tests."""

    row: str
    ok: bool | None = None
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def timed(self, seconds: float) -> Result:
        return replace(self, seconds=seconds)

    def cells(self, date: str = "") -> list[str]:
        """The columns, of which what is not known is '-'."""
        versions = [self.versions.get(name, "-") for name in ("python", "torch", "megatron-core", "transformer-engine")]
        counts = [str(self.counts.get(name, "-")) for name in ("passed", "failed", "skipped")]
        name = self.row if self.ok else f"{self.row} ({'not run' if self.ok is None else 'FAILED'})"
        return [name, *versions, *counts, f"{self.seconds:.0f}", date or time.strftime("%Y-%m-%d")]


def as_text(results: list[Result]) -> str:
    """Aligned columns."""
    lines = [list(COLUMNS), *(result.cells() for result in results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def write_markdown(file: Path, results: list[Result], order: list[str]) -> None:
    """Rewrite the table between the two marks of `file`; rows that did not run now keep their line.

    Raises ValueError where the marks are not there, once each and in this order.
    """
    text = file.read_text()
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"--markdown {file}: it must hold the lines {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    old, after = rest.split(end)
    lines = {line.split("|")[1].split()[0]: line for line in old.strip().splitlines()[2:]}
    lines |= {result.row: _line(result.cells()) for result in results if result.ok is not None}
    head = [_line(list(COLUMNS)), "|" + "---|" * len(COLUMNS)]
    body = [lines[name] for name in order if name in lines]
    file.write_text(f"{before}{begin}\n" + "\n".join(head + body) + f"\n{end}{after}")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
