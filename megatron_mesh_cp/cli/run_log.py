"""What the log of a run says: Megatron's loss lines and the plugin's communication lines."""

import re
from dataclasses import dataclass, field
from pathlib import Path

_NUMBER = r"[-+0-9.eE]+|nan|inf"
_ITERATION = re.compile(rf"\biteration\s+(\d+)/\s*\d+ \|.*\blm loss: ({_NUMBER})", re.IGNORECASE)
_VALIDATION = re.compile(rf"\bloss at iteration (\d+) on validation set \| lm loss value: ({_NUMBER})", re.IGNORECASE)
_COUNT = r"[^0-9(]*([0-9][0-9,_]*)"
_FAILURE = re.compile(r"(Error|Exception)\b.*:|\[mesh-cp\]|exiting program|successfully saved checkpoint")


@dataclass(frozen=True)
class RunLog:
    """Losses by iteration, as Megatron printed them (each the mean since the line before).

    `bytes_forward` and `bytes_backward` are what one rank handed to torch.distributed for one layer and
    microbatch, None where the run counted nothing.
    """

    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    bytes_forward: int | None = None
    bytes_backward: int | None = None

    @property
    def bytes_total(self) -> int | None:
        """Forward and backward together."""
        if self.bytes_forward is None or self.bytes_backward is None:
            return None
        return self.bytes_forward + self.bytes_backward


def parse_log(text: str) -> RunLog:
    """Read the output of a run."""
    losses, validation = {}, {}
    counts = (None, None)
    for line in text.splitlines():
        if match := _ITERATION.search(line):
            losses[int(match[1])] = float(match[2])
        elif match := _VALIDATION.search(line):
            validation[int(match[1])] = float(match[2])
        else:
            counts = _comm_bytes(line) or counts
    return RunLog(losses, validation, *counts)


def read_log(path: Path) -> RunLog:
    """`parse_log` of a file."""
    return parse_log(path.read_text(encoding="utf-8", errors="replace"))


def worth_showing(line: str) -> bool:
    """Is this line for the screen? Megatron prints hundreds more, which are in the log."""
    return bool(_ITERATION.search(line) or _VALIDATION.search(line) or _FAILURE.search(line))


def _comm_bytes(line: str) -> tuple[int, int] | None:
    if "[mesh-cp]" not in line or "comm" not in line or "bytes" not in line:
        return None
    # what stands in brackets is the prediction for a ring, not this run
    counted = re.sub(r"\([^)]*\)", "", line[line.index("bytes") :])
    forward = re.search("forward" + _COUNT, counted)
    backward = re.search("backward" + _COUNT, counted)
    if not (forward and backward):
        return None
    return tuple(int(re.sub("[,_]", "", match[1])) for match in (forward, backward))
