"""What `mesh-cp plan`, `tune` and `compare` ask alike: model, job, cluster; and sizes as people type them."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_mesh_cp.cli.report import limit
from megatron_mesh_cp.cluster import Cluster, load_cluster
from megatron_mesh_cp.cost import AttentionShape, check_heads
from megatron_mesh_cp.layout import check_seq_len
from megatron_mesh_cp.network import check_tp
from megatron_mesh_cp.units import parse_size

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element
PICTURES = (".png", ".svg", ".pdf")
MOST_PLANNED = 4096  # CP ranks; the time of a plan and of its check over all ranks grows with their square
MOST_STARTED = 256  # ranks on one machine: each is a process that imports torch


class Whole(argparse.Action):
    """An option that takes a whole number, least or more; its errors begin with the option and what was typed."""

    def __init__(self, *args, least: int = 1, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.least = least

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        flag = self.option_strings[0]
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", values):
            raise ValueError(f"{flag} {values or repr('')}: must be a {'positive ' if self.least else ''}whole number")
        if int(values) < self.least:
            raise ValueError(f"{flag} {values}: must be at least {self.least}")
        setattr(namespace, self.dest, int(values))


@dataclass(frozen=True)
class Setting:
    """One attention of one layer, as the options describe it.

    heads, kv_heads: of the model; `shape` has those of one tensor-parallel rank, and the tokens of one CP rank.
    """

    cp: int
    seq_len: int
    heads: int
    kv_heads: int
    tp: int
    dtype: str
    causal: bool
    shape: AttentionShape
    cluster: Cluster

    def as_json(self) -> dict:
        """The settings, under the names of the options."""
        return {
            **{"cp": self.cp, "seq_len": self.seq_len, "batch": self.shape.batch, "heads": self.heads},
            **{"kv_heads": self.kv_heads, "head_dim": self.shape.head_dim, "tp": self.tp, "dtype": self.dtype},
            **{"causal": self.causal, "cluster": self.cluster.name},
        }

    def model(self) -> str:
        """The model in half a line."""
        mask = "causal" if self.causal else "no mask"
        tp = f", TP {self.tp}" if self.tp > 1 else ""
        return (
            f"heads {self.heads}/{self.kv_heads} x {self.shape.head_dim}, batch {self.shape.batch}, "
            f"{self.dtype}, {mask}{tp}"
        )

    def machine(self) -> str:
        """The cluster in a line."""
        c = self.cluster
        nics = f"{c.nics_per_node} NIC{'s' if c.nics_per_node > 1 else ''}"
        return f"cluster {c.name}: {c.device}, {c.gpus_per_node} GPUs and {nics} a node"


def add_setting_options(parser: argparse.ArgumentParser, lists: bool = False) -> None:
    """The options of a `Setting`. lists: --cp and --seq-len may name several sizes."""
    several = ", or several by comma" if lists else ""
    parser.add_argument("--cp", required=True, metavar="N", help=f"context-parallel size{several}")
    parser.add_argument(
        "--seq-len", required=True, metavar="TOKENS", help=f"the whole sequence; 128k, 1m = 1024 * 1024{several}"
    )
    parser.add_argument("--heads", action=Whole, required=True, help="query heads of the model")
    parser.add_argument("--kv-heads", action=Whole, help="KV heads of the model (default: as --heads)")
    parser.add_argument("--head-dim", action=Whole, default=128, help="head dimension (%(default)s)")
    parser.add_argument("--batch", action=Whole, default=1, help="sequences at a time (%(default)s)")
    parser.add_argument(
        "--tp", action=Whole, default=1, help="tensor-parallel size; CP ranks are so far apart (%(default)s)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of what is sent (%(default)s)")
    parser.add_argument("--full", action="store_true", help="no causal mask (default: causal)")
    parser.add_argument(
        "--cluster", default="h100-ndr", metavar="NAME|FILE", help="a cluster by name, or its YAML file (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")


def read_setting(args: argparse.Namespace) -> Setting:
    """The one setting that the options describe. Raises ValueError naming the option."""
    cp, seq_len = parse_count(args.cp, "--cp"), parse_count(args.seq_len, "--seq-len")
    return _setting(args, cp, seq_len, load_cluster(args.cluster))


def read_settings(args: argparse.Namespace) -> list[Setting]:
    """All settings, each --cp with each --seq-len, ascending. Raises ValueError naming the option."""
    cluster = load_cluster(args.cluster)
    return [
        _setting(args, cp, seq_len, cluster)
        for cp in _sizes(args.cp, "--cp")
        for seq_len in _sizes(args.seq_len, "--seq-len")
    ]


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of a size such as 20GB (10^9) or 20GiB (2^30). Raises ValueError naming the flag."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from None


def check_device_memory(peak: int, cluster: Cluster) -> str:
    """What to warn of where a GPU of the cluster cannot hold so many bytes; nothing where it can."""
    if peak <= cluster.memory:
        return ""
    return f"{limit(peak)} is more than the {cluster.memory / 1e9:g} GB of one {cluster.device}"


def check_output(text: str, flag: str, endings: tuple[str, ...]) -> Path:
    """The path of a file to write. Raises ValueError where it has another ending or cannot be written."""
    path = Path(text)
    if path.suffix.lower() not in endings:
        raise ValueError(f"{flag} {text or repr('')}: the name must end in {' or '.join(endings)}")
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{flag} {text}: must be a file in a directory that is there")
        new = not path.exists()
        with path.open("ab"):  # the surest way to know; permissions alone do not tell it of every file system
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{flag} {text}: cannot write there: {error.strerror}") from None
    return path


def _setting(args: argparse.Namespace, cp: int, seq_len: int, cluster: Cluster) -> Setting:
    if cp > MOST_PLANNED:
        raise ValueError(f"--cp {cp}: the planner takes {MOST_PLANNED} ranks at most")
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    check_heads(args.heads, kv_heads, "--heads", "--kv-heads")
    for flag, heads in (("--heads", args.heads), ("--kv-heads", kv_heads)):
        if heads % args.tp:
            fits = [str(k) for k in range(1, kv_heads + 1) if kv_heads % k == 0 and args.heads % k == 0]
            raise ValueError(f"{flag} {heads} with --tp {args.tp}: it must divide them; it could be {', '.join(fits)}")
    check_tp(args.tp, cluster.gpus_per_node, "--tp")
    try:
        check_seq_len(seq_len, cp, flag="--seq-len")
    except ValueError as error:  # the check speaks of what --cp is called in Megatron
        raise ValueError(str(error).replace("context_parallel_size", "--cp")) from None
    shape = AttentionShape(
        seq_len // cp,
        args.batch,
        args.heads // args.tp,
        kv_heads // args.tp,
        args.head_dim,
        item_bytes=DTYPES[args.dtype],
    )
    return Setting(cp, seq_len, args.heads, kv_heads, args.tp, args.dtype, not args.full, shape, cluster)


def _sizes(text: str, flag: str) -> list[int]:
    sizes = [parse_count(word, flag, text) for word in text.split(",")]
    twice = next((word for word in sizes if sizes.count(word) > 1), None)
    if twice is not None:
        raise ValueError(f"{flag} {text}: {twice} is there {sizes.count(twice)} times; name it once")
    return sorted(sizes)


def parse_count(text: str, flag: str, whole: str = "") -> int:
    """16, 128k = 128 * 1024, 1m. whole: the list that the text is from. Raises ValueError naming the flag."""
    if not text.strip() and "," in whole:
        raise ValueError(f"{flag} {whole}: there is an empty entry; leave out the comma too much")
    match = re.fullmatch(r"\s*([0-9]+)([kKmM]?)\s*", text)
    size = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if size < 1:
        raise ValueError(
            f"{flag} {text or repr('')}: must be a positive whole number, such as 16, 128k (k = 1024) or 1m"
        )
    return size
