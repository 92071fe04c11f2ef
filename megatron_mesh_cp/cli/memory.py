"""--memory-limit of `mesh-cp plan`, `tune` and `compare`: what tiles need, and the error where none of them fits."""

from __future__ import annotations

from functools import cache

from megatron_mesh_cp.cli.options import Setting
from megatron_mesh_cp.cli.report import limit
from megatron_mesh_cp.cost import mesh_bytes
from megatron_mesh_cp.network import Network
from megatron_mesh_cp.plan import EXCHANGES, Direction
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import needed_bytes, tiles_for


class Needs:
    """Peak bytes of tiles as they are planned on the cluster; nothing is simulated."""

    def __init__(self, setting: Setting, exchange: str) -> None:
        self.setting = setting
        self.exchanges = EXCHANGES if exchange == "auto" else (exchange,)
        self.tiles = tiles_for(setting.cp, Network(setting.cluster, setting.tp).ranks_per_node)
        self.of = cache(self._of)

    def _of(self, tile: TileShape, direction: Direction) -> int:
        """With the exchange that needs less."""
        s = self.setting
        return min(
            needed_bytes(tile, direction, exchange, s.shape, s.cluster, tp=s.tp, causal=s.causal)
            for exchange in self.exchanges
        )

    def least(self, tile: str, backward: str) -> int:
        """The smallest limit with which these --tile and --tile-backward are planned."""
        forward_tiles = self._tiles(tile)
        if backward == "same":
            return min(max(self.of(t, d) for d in Direction) for t in forward_tiles)
        forward = min(self.of(t, Direction.FORWARD) for t in forward_tiles)
        return max(forward, min(self.of(t, Direction.BACKWARD) for t in self._tiles(backward)))

    def fewest_bytes(self, directions: tuple[Direction, ...], most: int) -> TileShape | None:
        """The tile for all these directions that sends the fewest bytes of those within a limit, if there is one."""

        def key(tile: TileShape) -> tuple:
            sent = sum(sum(mesh_bytes(tile, d, self.setting.shape).values()) for d in directions)
            return sent, tile.transposed, tile.a

        fitting = (t for t in sorted(self.tiles, key=key) if all(self.of(t, d) <= most for d in directions))
        return next(fitting, None)

    def _tiles(self, text: str) -> tuple[TileShape, ...]:
        return self.tiles if text == "auto" else (TileShape.parse(text),)


def memory_error(text: str, setting: Setting, tile: str, backward: str, exchange: str) -> ValueError:
    """The error where nothing fits --memory-limit `text`, with a limit that would do for these options."""
    least = Needs(setting, exchange).least(tile, backward)
    options = {"--tile": tile, "--tile-backward": backward, "--exchange": exchange}
    asked = {flag: value for flag, value in options.items() if value not in ("auto", "same")}
    if not asked:
        return ValueError(
            f"--memory-limit {text}: no tile fits; the smallest need is {least:,} bytes a rank, so {limit(least, '')} "
            "would do; or raise --cp or --tp, or lower --seq-len or --batch"
        )
    free = Needs(setting, "auto").least("auto", "auto" if "--tile-backward" in asked else backward)
    less = f"{' '.join(f'{flag} auto' for flag in asked)} would need {limit(free, '')}"
    given = " ".join(f"{flag} {value}" for flag, value in asked.items())
    return ValueError(
        f"--memory-limit {text} with {given}: it needs {limit(least, '')}; "
        + (less if free < least else "raise --cp or --tp, or lower --seq-len or --batch, to need less")
    )
