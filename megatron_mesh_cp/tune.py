"""The choice of tile, placement and exchange: least predicted time on a cluster, or fewest bytes without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bounds import lower_bound
from .cost import AttentionShape, Costs, mesh_bytes, nominal_costs
from .layout import BlockKind
from .network import Network
from .plan import EXCHANGES, Channel, Direction, Payload, Plan, live_bytes
from .schedule import make_plan
from .simulate import simulate
from .tile import TileShape, all_tiles

if TYPE_CHECKING:
    from .cluster import Cluster

TIE = 0.01  # candidates this close to the fastest count as equally fast


class MemoryLimitError(ValueError):
    """No candidate fits the memory limit. `smallest`: the least that any needs, bytes."""

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Candidate:
    """One way to do one direction of an attention.

    bytes: sent per rank. seconds, wait: simulated over all ranks, wait that of the slowest; bound: no schedule of this
    tile is shorter; all three None where no cluster is known. peak_bytes: largest number of bytes that a rank holds
    for the plan (see plan.live_bytes). plan: what runs.
    """

    direction: Direction
    tile: TileShape
    exchange: str
    bytes: int
    seconds: float | None
    wait: float | None
    bound: float | None
    peak_bytes: int
    plan: Plan
    costs: Costs

    def __str__(self) -> str:
        return f"{self.tile} {self.exchange}"


@dataclass(frozen=True)
class Decision:
    """What `decide` chose for the two directions, and why, in one line."""

    forward: Candidate
    backward: Candidate
    why: str


def costs_for(
    cluster: Cluster,
    shape: AttentionShape,
    tile: TileShape,
    direction: Direction,
    *,
    exchange: str = "direct",
    tp: int = 1,
    causal: bool = True,
) -> Costs:
    """Seconds of one transfer of each kind and of one block, as the scheduler plans with them.

    A transfer takes the mean over the rounds of its group (`direct`: some peers share the node, some do not), or what
    its slowest hop takes (`shift`: each round waits for it). The channels share a link where both are bound by the
    same ports. What really happens at the ports is for the simulator to say.
    """
    network = Network(cluster, tp)
    once: dict[Channel, _Hop] = {}
    for channel, group in ((Channel.ROW, tile.row_group), (Channel.COLUMN, tile.column_group)):
        once[channel] = _hop(network, tile.size, group, exchange)
    payloads = direction.row_input, Payload.KV, direction.row_result, direction.column_result
    durations = [0.0 if p is None else once[p.channel].seconds(shape.message_bytes(p), p.is_result) for p in payloads]
    kind = BlockKind.KV_FIRST_HALF if causal else BlockKind.FULL
    both = tile.a > 1 and tile.b > 1
    same = once[Channel.ROW].outside_longer == once[Channel.COLUMN].outside_longer
    return Costs(*durations, cluster.block_seconds(shape, kind, direction), links=1 if both and same else 2)


@dataclass(frozen=True)
class _Hop:
    """One round of a group: seconds a byte inside the node and between nodes, and the latency.

    side_by_side: of the two results that `shift` sends in one round, one stays inside the node.
    """

    inside: float
    outside: float
    latency: float
    side_by_side: bool

    @property
    def outside_longer(self) -> bool:
        return self.outside > self.inside

    def seconds(self, size: int, result: bool) -> float:
        """Of one message. A round of two results is planned as twice this."""
        if self.side_by_side:  # every round waits for the hop between nodes
            return self.outside * size / (2 if result else 1) + self.latency
        return (self.inside + self.outside) * size + self.latency


def _hop(network: Network, n: int, group: Callable[[int], tuple[int, ...]], exchange: str) -> _Hop:
    """The mean over the rounds (`direct`), or the slowest hop, for which every round waits (`shift`)."""
    w, intra, inter = network.ranks_per_node, network.cluster.intra, network.cluster.inter
    crossing: list[float] = []
    for rank in range(min(w, n)):
        members = group(rank)
        if len(members) == 1:
            return _Hop(0.0, 0.0, 0.0, False)
        if exchange == "shift":
            peers = [members[(members.index(rank) + 1) % len(members)]]
        else:
            peers = [m for m in members if m != rank]
        crossing.append(sum(peer // w != rank // w for peer in peers) / len(peers))
    senders = sum(share > 0 for share in crossing)
    share = max(crossing) if exchange == "shift" else sum(crossing) / len(crossing)
    outside = share / network.inter_bandwidth(max(1, senders))
    latency = share * inter.latency + (1 - share) * intra.latency
    inside = (1 - share) / intra.bandwidth
    return _Hop(inside, outside, latency, side_by_side=exchange == "shift" and 0 < senders < len(crossing))


def evaluate(
    tile: TileShape,
    direction: Direction,
    exchange: str,
    shape: AttentionShape,
    cluster: Cluster | None = None,
    *,
    tp: int = 1,
    causal: bool = True,
) -> Candidate:
    """Plan and simulate one candidate. Raises ValueError for an unknown exchange or a tp that does not fit a node."""
    costs = planning_costs(tile, direction, exchange, shape, cluster, tp=tp, causal=causal)
    plan = make_plan(tile, direction, exchange, costs)
    timeline = None if cluster is None else simulate(plan, cluster, shape, tp=tp, causal=causal)
    return Candidate(
        direction=direction,
        tile=tile,
        exchange=exchange,
        bytes=sum(mesh_bytes(tile, direction, shape).values()),
        seconds=timeline and timeline.seconds,
        wait=timeline and timeline.wait,
        bound=cluster and lower_bound(tile, direction, exchange, cluster, shape, tp=tp, causal=causal),
        peak_bytes=peak_bytes(plan, shape),
        plan=plan,
        costs=costs,
    )


def planning_costs(
    tile: TileShape,
    direction: Direction,
    exchange: str,
    shape: AttentionShape,
    cluster: Cluster | None,
    *,
    tp: int = 1,
    causal: bool = True,
) -> Costs:
    """What a candidate is planned with: durations on the cluster, nominal ones where none is known."""
    if cluster is None:
        return nominal_costs(direction, shape)
    return costs_for(cluster, shape, tile, direction, exchange=exchange, tp=tp, causal=causal)


def peak_bytes(plan: Plan, shape: AttentionShape) -> int:
    """The most that a rank holds for a template plan beside the caller's own tensors, bytes; see plan.live_bytes."""
    message = {p: shape.message_bytes(p) for p in Payload}
    partial = {p: shape.partial_bytes(p) for p in Payload}
    return max(live_bytes(plan, 0, message, partial), default=0)


def needed_bytes(
    tile: TileShape,
    direction: Direction,
    exchange: str,
    shape: AttentionShape,
    cluster: Cluster | None,
    *,
    tp: int = 1,
    causal: bool = True,
) -> int:
    """Candidate.peak_bytes without simulating it."""
    costs = planning_costs(tile, direction, exchange, shape, cluster, tp=tp, causal=causal)
    return peak_bytes(make_plan(tile, direction, exchange, costs), shape)


def tiles_for(n: int, ranks_per_node: int | None = None) -> tuple[TileShape, ...]:
    """Every tile for n ranks; where the nodes are smaller than n, also with the column group on consecutive ranks."""
    tiles = all_tiles(n)
    if ranks_per_node is None or n <= ranks_per_node:
        return tiles
    return tiles + tuple(TileShape(t.a, t.b, transposed=True) for t in tiles if t.a > 1 and t.b > 1)


def rank_candidates(
    n: int,
    shape: AttentionShape,
    direction: Direction,
    cluster: Cluster | None = None,
    *,
    tp: int = 1,
    causal: bool = True,
    tiles: Sequence[TileShape] | None = None,
    exchanges: Sequence[str] = EXCHANGES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Candidate]:
    """Every tile with every exchange, best first: the fastest; among those within TIE of it, the fewest bytes.

    progress: told how many are done, and of how many.
    """
    if tiles is None:
        tiles = tiles_for(n, Network(cluster, tp).ranks_per_node if cluster else None)
    todo = [(tile, exchange) for tile in tiles for exchange in (exchanges if cluster else exchanges[:1])]
    found = []
    for done, (tile, exchange) in enumerate(todo, start=1):
        found.append(evaluate(tile, direction, exchange, shape, cluster, tp=tp, causal=causal))
        if progress is not None:
            progress(done, len(todo))
    return sorted(found, key=_order(found))


def _order(found: Sequence[Candidate]) -> Callable[[Candidate], tuple]:
    best = min((c.seconds or 0.0 for c in found), default=0.0) * (1 + TIE)

    def key(c: Candidate) -> tuple:
        seconds = c.seconds or 0.0
        return max(seconds, best), c.bytes, c.peak_bytes, seconds, c.tile.transposed, c.tile.a, c.exchange

    return key


def best_tile(n: int, shape: AttentionShape, direction: Direction | None = None) -> TileShape:
    """The tile for n ranks that sends the fewest bytes, ties to the smaller row.

    direction: count only the forward or the backward; None counts both, for one tile that serves both.
    """
    directions = tuple(Direction) if direction is None else (direction,)

    def cost(tile: TileShape) -> tuple[int, int]:
        return sum(sum(mesh_bytes(tile, d, shape).values()) for d in directions), tile.a

    return min(all_tiles(n), key=cost)


def decide(
    n: int,
    shape: AttentionShape,
    cluster: Cluster | None = None,
    *,
    tile: str = "auto",
    backward: str = "same",
    exchange: str = "auto",
    tp: int = 1,
    causal: bool = True,
    memory_limit: int | None = None,
) -> Decision:
    """Forward and backward tile, placement and exchange from what the user typed.

    Args:
        tile: 'auto' or AxB; backward: 'same', 'auto' or AxB. An automatic forward tile whose backward is 'same' is the
            best for both directions together.
        exchange: 'auto', 'direct' or 'shift'; 'auto' is 'direct' where no cluster is known.
        memory_limit: bytes that a plan may hold on a rank (see Candidate.peak_bytes).

    Raises ValueError where a tile does not fit n, and MemoryLimitError where nothing fits the limit.
    """
    search = _Search(n, shape, cluster, exchange, tp, causal, memory_limit)
    given = None if tile == "auto" else _given(n, tile, "--mesh-tile-shape")
    if backward == "same":
        forward_found, backward_found = search.both(search.tiles if given is None else (given,))
    else:
        other = None if backward == "auto" else (_given(n, backward, "--mesh-tile-shape-backward"),)
        forward_found = search.best(Direction.FORWARD, search.tiles if given is None else (given,))
        backward_found = search.best(Direction.BACKWARD, other or search.tiles)
    return Decision(forward_found, backward_found, search.why(forward_found, backward_found, tile, backward))


def _given(n: int, text: str, flag: str) -> TileShape:
    tile = TileShape.parse(text, flag)
    tile.check_size(n, flag)
    return tile


class _Search:
    """Candidates of `decide`; those that cannot win are not simulated."""

    def __init__(
        self,
        n: int,
        shape: AttentionShape,
        cluster: Cluster | None,
        exchange: str,
        tp: int,
        causal: bool,
        memory_limit: int | None,
    ) -> None:
        self.n, self.shape, self.cluster, self.tp, self.causal = n, shape, cluster, tp, causal
        self.limit = memory_limit
        self.exchanges = (exchange,) if exchange != "auto" else EXCHANGES if cluster else EXCHANGES[:1]
        self.tiles = tiles_for(n, Network(cluster, tp).ranks_per_node if cluster else None)
        self._known: dict[tuple[TileShape, str, Direction], Candidate] = {}
        self._needs: dict[tuple[TileShape, str, Direction], int] = {}

    def best(self, direction: Direction, tiles: Sequence[TileShape]) -> Candidate:
        """The best candidate of one direction."""
        return self._pick(tiles, (direction,))[direction]

    def both(self, tiles: Sequence[TileShape]) -> tuple[Candidate, Candidate]:
        """The best tile for both directions together; each direction has its own exchange."""
        found = self._pick(tiles, tuple(Direction))
        return found[Direction.FORWARD], found[Direction.BACKWARD]

    def _pick(self, tiles: Sequence[TileShape], ways: Sequence[Direction]) -> dict[Direction, Candidate]:
        """One tile for all of `ways`, the best for their sum."""
        floor = {tile: sum(self._floor(tile, d) for d in ways) for tile in tiles}
        options: list[dict[Direction, Candidate]] = []
        fastest = float("inf")
        lowest = min(floor.values()) * (1 + TIE if self.cluster else 1)
        for tile in sorted(tiles, key=lambda t: (max(floor[t], lowest), self._bytes(t, ways), t.transposed, t.a)):
            # Equally fast ones come with the fewest bytes first: nothing after one at the lowest bound can win.
            if floor[tile] > fastest or fastest <= lowest or (options and self.cluster is None):
                break
            option = {}
            for d in ways:
                fits = [self._evaluate(tile, e, d) for e in self.exchanges if self._fits(tile, e, d)]
                if fits:
                    option[d] = min(fits, key=_order(fits))
            if len(option) == len(ways):
                options.append(option)
                fastest = min(fastest, sum(c.seconds or 0.0 for c in option.values()))
        if not options:
            self._nothing_fits(tiles, ways)
        best = min(sum(c.seconds or 0.0 for c in option.values()) for option in options) * (1 + TIE)

        def key(option: dict[Direction, Candidate]) -> tuple:
            seconds = sum(c.seconds or 0.0 for c in option.values())
            peak = max(c.peak_bytes for c in option.values())
            tile = next(iter(option.values())).tile
            sent = sum(c.bytes for c in option.values())
            return max(seconds, best), sent, peak, seconds, tile.transposed, tile.a

        return min(options, key=key)

    def _evaluate(self, tile: TileShape, exchange: str, direction: Direction) -> Candidate:
        key = (tile, exchange, direction)
        if key not in self._known:
            self._known[key] = evaluate(
                tile, direction, exchange, self.shape, self.cluster, tp=self.tp, causal=self.causal
            )
        return self._known[key]

    def _bytes(self, tile: TileShape, directions: Sequence[Direction]) -> int:
        return sum(sum(mesh_bytes(tile, d, self.shape).values()) for d in directions)

    def _floor(self, tile: TileShape, direction: Direction) -> float:
        """Without planning: no schedule of the tile is shorter, with any of the exchanges."""
        if self.cluster is None:
            return float(self._bytes(tile, (direction,)))
        return min(
            lower_bound(tile, direction, e, self.cluster, self.shape, tp=self.tp, causal=self.causal)
            for e in self.exchanges
        )

    def _fits(self, tile: TileShape, exchange: str, direction: Direction) -> bool:
        return self.limit is None or self._need(tile, exchange, direction) <= self.limit

    def _need(self, tile: TileShape, exchange: str, direction: Direction) -> int:
        """Peak bytes of a candidate; planned, not simulated."""
        key = (tile, exchange, direction)
        if key not in self._needs:
            self._needs[key] = needed_bytes(
                tile, direction, exchange, self.shape, self.cluster, tp=self.tp, causal=self.causal
            )
        return self._needs[key]

    def _nothing_fits(self, tiles: Sequence[TileShape], ways: Sequence[Direction]) -> None:
        """Raise MemoryLimitError with the smallest need: that of the direction which needs more, of the best tile."""
        needs = {
            tile: max(min(self._need(tile, e, d) for e in self.exchanges) for d in ways)
            for tile in dict.fromkeys((*tiles, *self.tiles))
        }
        tile = min(needs, key=lambda t: needs[t])
        which = f"tile {tiles[0]} needs {needs[tiles[0]]}" if len(tiles) == 1 else f"none of {len(needs)} tiles fits"
        smallest = f"the smallest need is {needs[tile]} bytes a rank, of tile {tile}"
        raise MemoryLimitError(f"memory limit {self.limit} bytes: {which}; {smallest}", needs[tile])

    def why(self, forward: Candidate, backward: Candidate, tile: str, asked_backward: str) -> str:
        """One line: how it was chosen, what it takes, and what the ring would take."""
        if tile != "auto" and asked_backward != "auto":
            reason = "as given" if self.cluster is None or len(self.exchanges) == 1 else "as given, exchange by time"
        elif self.cluster is None:
            reason = "fewest bytes; no cluster is known"
        else:
            reason = f"fewest bytes within {TIE:.0%} of the least predicted time on {self.cluster.name}"
        if self.limit is not None:
            reason += f", at most {self.limit / 1e9:.4g} GB held"
        if self.cluster is None:
            return reason
        seconds, wait = forward.seconds + backward.seconds, forward.wait + backward.wait
        ring = sum(self._evaluate(TileShape(1, self.n), "shift", d).seconds for d in Direction)
        return (
            f"{reason}: forward + backward {_milliseconds(seconds)} ms, of which {wait / seconds:.1%} waiting; "
            f"a ring {_milliseconds(ring)} ms"
        )


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
