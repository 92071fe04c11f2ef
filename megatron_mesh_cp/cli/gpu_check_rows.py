"""What scripts/gpu_check.sh prints: one row a check, and how an error becomes a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

OK, FAIL = "ok", "FAIL"
ABSENT = "absent"  # a kernel, or a dtype of it, that is not on this machine; the figure says why
NOT_APPLICABLE = "n/a"  # nothing was judged; the figure or the bound says why

TIMES_TORCH, TIMES_TORCH_RANKS = 1.5, 2.0  # root mean square error over torch's own
LARGEST_TIMES_TORCH = 4.0  # the same of the largest error, which is a matter of luck by a factor of two
EPS_BLOCK = 4.0  # of one block, in units of the dtype's eps: relative root mean square error
LSE = 1e-3  # largest error of lse, natural log

Sums = tuple[float, float, float]  # of some elements: squared errors, squared true values, the largest error


@dataclass(frozen=True)
class Row:
    """One line of the table. figure: what was found; bound: what it was held against."""

    check: str
    kernel: str
    result: str
    figure: str
    bound: str = ""


@dataclass(frozen=True)
class Error:
    """rms: root mean square of the error over that of the true values; largest: absolute."""

    rms: float
    largest: float

    @classmethod
    def of(cls, got: torch.Tensor, want: torch.Tensor) -> Error:
        return cls.together([sums(got, want)])

    @classmethod
    def together(cls, parts: Iterable[Sums]) -> Error:
        """The error of a tensor of which each part, such as each rank's, is summed up already."""
        wrong, true, largest = zip(*parts, strict=True)
        # NaN must survive, and Python's max() drops it, depending on the order.
        worst = torch.tensor(largest, dtype=torch.float64).max().item()
        return cls(math.sqrt(sum(wrong) / max(sum(true), 1e-300)), worst)


def sums(got: torch.Tensor, want: torch.Tensor) -> Sums:
    """What `Error.together` puts together. Raises ValueError where the shapes differ."""
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {list(got.shape)}, it should be {list(want.shape)}")
    error = got.detach().to(want.dtype) - want
    return error.square().sum().item(), want.square().sum().item(), error.abs().max().item()


@dataclass
class Tally:
    """The worst of many errors, each as a fraction of its bound."""

    times_torch: float = TIMES_TORCH
    worst: float = -1.0
    figure: str = ""
    bounds: dict[str, None] = field(default_factory=dict)  # in the order in which they came up

    def add(self, where: str, error: Error, torch_error: Error | None, eps: float) -> None:
        """Against torch's error on the same tensor; where torch cannot compute it, against eps."""
        if torch_error is None:
            self._add(error.rms / (EPS_BLOCK * eps), f"rms {error.rms:.2e} = {error.rms / eps:.2g} eps: {where}")
            self.bounds[f"{EPS_BLOCK:g} eps"] = None
            return
        rms, largest = error.rms / torch_error.rms, error.largest / torch_error.largest
        worse = torch.tensor([rms / self.times_torch, largest / LARGEST_TIMES_TORCH]).max().item()
        self._add(worse, f"rms {error.rms:.2e} = {rms:.2f} x torch's, largest {largest:.2f} x: {where}")
        self.bounds[f"rms {self.times_torch:g} x torch's, largest {LARGEST_TIMES_TORCH:g} x"] = None

    def add_lse(self, where: str, error: Error) -> None:
        self._add(error.largest / LSE, f"lse off by {error.largest:.1e}: {where}")
        self.bounds[f"lse {LSE:g}"] = None

    def _add(self, fraction: float, figure: str) -> None:
        fraction = math.inf if math.isnan(fraction) else fraction
        if fraction > self.worst:
            self.worst, self.figure = fraction, figure

    def row(self, check: str, kernel: str, more: str = "") -> Row:
        """more: said after the figure. A tally without errors has checked nothing, which is a failure."""
        result = OK if 0 <= self.worst <= 1 else FAIL
        return Row(check, kernel, result, (self.figure or "nothing was measured") + more, "; ".join(self.bounds))
