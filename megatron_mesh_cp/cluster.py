"""What a cluster can do: its links, its NICs, its attention kernel. One YAML file a cluster, in the units people use.

    name: h100-ndr                    # the name of the file
    device: NVIDIA H100 SXM 80GB
    description: a line for people
    gpus_per_node: 8                  # that one NVLink domain holds
    nics_per_node: 8
    memory_gb: 80                     # of one GPU, 10^9 bytes
    peak_tflops: 989                  # dense, in the dtype of the kernel rates; no rate may be above it
    links:
      intra: {bandwidth_gb_s: 370, latency_us: 3.3, source: ..}   # a GPU's, one direction, as achieved
      inter: {bandwidth_gb_s: 45, latency_us: 3.7, source: ..}    # a NIC's, one direction, as achieved
    kernel:                           # TFLOP/s of one attention call at each chunk length
      {head_dim: 128, lengths: [512, 1024], forward_full: [..], forward_causal: [..], .., source: ..}

`head_dim`, `description` and every `source` are for people: they say where a figure is from and when it holds.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from .cost import AttentionShape
from .layout import BlockKind
from .plan import Direction

_DIRECTORY = Path(__file__).resolve().parents[1] / "configs" / "clusters"
_RATES = ("forward_full", "forward_causal", "backward_full", "backward_causal")
_HALVES = (BlockKind.Q_SECOND_HALF, BlockKind.KV_FIRST_HALF)


@dataclass(frozen=True)
class Link:
    """bandwidth: bytes/s in one direction, as achieved; latency: seconds."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _check_positive("bandwidth", self.bandwidth)
        _check_positive("latency", self.latency, or_zero=True)


@dataclass(frozen=True)
class KernelRates:
    """FLOP/s of one attention call, by direction, mask and chunk length (tokens, ascending).

    FLOPs are those of the live area: forward 4 s^2 h d, backward 2.5 times that, half of it under a causal mask.
    """

    lengths: tuple[int, ...]
    forward_full: tuple[float, ...]
    forward_causal: tuple[float, ...]
    backward_full: tuple[float, ...]
    backward_causal: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"kernel.lengths must be one or more tokens, ascending, got {list(self.lengths)}")
        for length in self.lengths:
            _check_positive("lengths", length)
        for name in _RATES:
            rates = getattr(self, name)
            if len(rates) != len(self.lengths):
                raise ValueError(
                    f"kernel.{name} has {len(rates)} rates for {len(self.lengths)} lengths; give one for each"
                )
            for rate in rates:
                _check_positive(name, rate)

    def rate(self, direction: Direction, causal: bool, length: int) -> float:
        """FLOP/s at a chunk length: linear in log(length) between the lengths, and flat above the longest.

        Below the shortest the rate falls in proportion to the length: launches and memory take the time there, which
        is the same for fewer FLOPs. Raises ValueError where the length is not positive.
        """
        _check_positive("length", length)
        rates = getattr(self, f"{direction.value}_{'causal' if causal else 'full'}")
        if length <= self.lengths[0]:
            return rates[0] * length / self.lengths[0]
        if length >= self.lengths[-1]:
            return rates[-1]
        after = next(k for k, known in enumerate(self.lengths) if known > length)
        low, high = self.lengths[after - 1], self.lengths[after]
        part = math.log(length / low) / math.log(high / low)
        return rates[after - 1] + part * (rates[after] - rates[after - 1])


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs with equal NICs.

    intra: what one GPU's port inside its node does, each way; inter: what one NIC does, each way. GPU k of a node uses
    NIC k * nics_per_node // gpus_per_node. peak_flops: of one GPU, FLOP/s; memory: of one GPU, bytes.

    Raises ValueError, naming the field as the YAML file has it, where a size is not positive or a rate is above the
    peak of the device.
    """

    name: str
    device: str
    gpus_per_node: int
    nics_per_node: int
    intra: Link
    inter: Link
    kernel: KernelRates
    peak_flops: float
    memory: int

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "nics_per_node", "peak_flops", "memory"):
            _check_positive(field, getattr(self, field))
        if self.nics_per_node > self.gpus_per_node:
            raise ValueError(
                f"nics_per_node {self.nics_per_node} with gpus_per_node {self.gpus_per_node}: a GPU uses one NIC; "
                f"where it has several, give nics_per_node {self.gpus_per_node} and the bandwidth of them together"
            )
        if self.gpus_per_node % self.nics_per_node:
            fits = [str(k) for k in range(1, self.gpus_per_node + 1) if self.gpus_per_node % k == 0]
            raise ValueError(
                f"nics_per_node {self.nics_per_node} with gpus_per_node {self.gpus_per_node}: as many GPUs must share "
                f"each NIC; it could be {', '.join(fits)}"
            )
        # Megatron-Bridge PR 2665: a bench that printed 1937 TFLOP/s had skipped its work.
        for field in _RATES:
            for length, rate in zip(self.kernel.lengths, getattr(self.kernel, field), strict=True):
                if rate > self.peak_flops:
                    raise ValueError(
                        f"kernel.{field} at {length} tokens is {rate / 1e12:g} TFLOP/s, above peak_tflops "
                        f"{self.peak_flops / 1e12:g} of {self.device}: no kernel can do that; correct one of the two"
                    )

    def block_seconds(self, shape: AttentionShape, kind: BlockKind, direction: Direction) -> float:
        """Seconds of one block (Q_i, KV_j) of a shape.

        FLOPs = 4 * live area * heads * head_dim * batch, backward 2.5 times that; 4 d is 2 (d + dv) where V has
        another head dim. A half block is called without a mask, half as long on one side: it gets the rate of the
        shorter side.
        """
        if kind is BlockKind.EMPTY:
            return 0.0
        area = kind.live_fraction * shape.seq_local**2
        dims = shape.head_dim + (shape.v_head_dim or shape.head_dim)
        flops = 2 * dims * area * shape.heads * shape.batch * (1.0 if direction is Direction.FORWARD else 2.5)
        length = max(1, shape.seq_local // 2) if kind in _HALVES else shape.seq_local
        return flops / self.kernel.rate(direction, kind is BlockKind.CAUSAL, length)


def cluster_names() -> tuple[str, ...]:
    """The clusters that the project describes, by name; none in an installation without the project's `configs/`."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.yaml")))


def load_cluster(name_or_path: str, flag: str = "--cluster") -> Cluster:
    """The cluster of a name (see `cluster_names`) or of a YAML file.

    Raises ValueError, one line that starts with the flag and what was typed: an unknown name, a file that cannot be
    read, and everything that `parse_cluster` refuses.
    """
    try:
        return parse_cluster(_find(name_or_path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{flag} {name_or_path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {name_or_path}: not a text file in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{flag} {name_or_path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """The cluster that the text of a YAML file describes; for the form see the top of this file.

    Raises ValueError naming the field: an unknown one (with the nearest known), a missing one, one given twice, a
    value that is not a positive number, a rate above the peak.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if value is None:
        raise ValueError("the file is empty; for the form of a cluster file see those in configs/clusters")
    sizes = ("gpus_per_node", "nics_per_node", "memory_gb", "peak_tflops")
    top = _Section(value, ("name", "device", "description", *sizes, "links", "kernel"))
    links = top.section("links", ("intra", "inter"))
    kernel = top.section("kernel", ("head_dim", "lengths", *_RATES, "source"))
    for section, key in ((top, "description"), (kernel, "source")):
        section.text(key)
    kernel.count("head_dim")
    rates = KernelRates(
        tuple(kernel.each("lengths", whole=True)),
        *(tuple(rate * 1e12 for rate in kernel.each(field)) for field in _RATES),
    )
    return Cluster(
        name=top.text("name"),
        device=top.text("device"),
        gpus_per_node=top.count("gpus_per_node"),
        nics_per_node=top.count("nics_per_node"),
        intra=_link(links, "intra"),
        inter=_link(links, "inter"),
        kernel=rates,
        peak_flops=top.number("peak_tflops") * 1e12,
        memory=round(top.number("memory_gb") * 1e9),
    )


def _find(name_or_path: str) -> Path:
    """The file of a name, or the path itself where it looks like one or is there."""
    names = cluster_names()
    if name_or_path in names:
        return _DIRECTORY / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return path
    if not names:
        raise ValueError(
            "the project's configs/clusters is not in this installation, so that no name is known; give the path of a "
            "YAML FILE (`mesh-cp calibrate` writes one)"
        )
    if name_or_path == "auto":
        raise ValueError(
            "plan, tune, compare and bench must know the machine; give a name "
            f"({', '.join(names)}) or a YAML FILE (`mesh-cp calibrate` writes one)"
        )
    raise ValueError(
        f"unknown cluster{_nearest(name_or_path, names)} known are {', '.join(names)}, or give a YAML FILE"
    )


def _link(links: _Section, name: str) -> Link:
    link = links.section(name, ("bandwidth_gb_s", "latency_us", "source"))
    link.text("source")
    return Link(link.number("bandwidth_gb_s") * 1e9, link.number("latency_us", or_zero=True) * 1e-6)


class _Section:
    """A mapping in a cluster file. Its errors name the field as it is written there, such as links.intra.latency_us."""

    def __init__(self, value: object, fields: tuple[str, ...], prefix: str = "") -> None:
        if not isinstance(value, dict):
            raise ValueError(
                f"{prefix[:-1] or 'a cluster file'} must be a mapping of `key: value` lines, got {value!r}"
            )
        for key in value:
            if key not in fields:
                raise ValueError(
                    f"unknown field {prefix}{key}{_nearest(str(key), fields)} the fields are {', '.join(fields)}"
                )
        missing = [prefix + field for field in fields if field not in value]
        if missing:
            raise ValueError(f"missing {'field' if len(missing) == 1 else 'fields'} {', '.join(missing)}")
        self._value, self._prefix = value, prefix

    def section(self, key: str, fields: tuple[str, ...]) -> _Section:
        return _Section(self._value[key], fields, f"{self._prefix}{key}.")

    def text(self, key: str) -> str:
        value = self._value[key]
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self._prefix}{key} must be a text, got {value!r}")
        return value

    def number(self, key: str, or_zero: bool = False) -> float:
        _check_positive(self._prefix + key, self._value[key], or_zero)
        return float(self._value[key])

    def count(self, key: str) -> int:
        _check_count(self._prefix + key, self._value[key])
        return self._value[key]

    def each(self, key: str, whole: bool = False) -> list:
        values = self._value[key]
        if not isinstance(values, list):
            raise ValueError(f"{self._prefix}{key} must be a list such as [512, 1024], got {values!r}")
        for value in values:
            (_check_count if whole else _check_positive)(self._prefix + key, value)
        return values


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, which PyYAML would let pass with the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"line {node.start_mark.line + 1}: {twice} is given twice")
        return super().construct_mapping(node, deep)


def _check_positive(name: str, value: object, or_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not or_zero):
        raise ValueError(
            f"{name} must be {'zero or ' if or_zero else ''}a positive number, got {value!r}{_hint(value)}"
        )


def _hint(value: object) -> str:
    """How to write a number that YAML 1.1 takes for a text, such as 1e-3, which has no dot."""
    match = re.fullmatch(r"([+-]?[0-9]+)(\.[0-9]*)?[eE]([+-]?)([0-9]+)", value) if isinstance(value, str) else None
    if match is None:
        return ""
    return f", a text to YAML; write {match[1]}{match[2] or '.0'}e{match[3] or '+'}{match[4]}"


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ";"
