"""CUDA streams under the channels, without a GPU: order, memory, and the lockstep that Note [Streams] relies on."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mesh_cases import Case, mesh_groups, run_mesh

from megatron_mesh_cp import comm, streams
from megatron_mesh_cp.cost import nominal_costs
from megatron_mesh_cp.plan import EXCHANGES, Channel, Direction, EventKind, Payload, Plan, Transfer
from megatron_mesh_cp.schedule import make_plan
from megatron_mesh_cp.tile import TileShape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeCuda:
    """torch.cuda's streams as far as StreamOrder uses them; `log` has what was done and in which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple] = []
        self.made = 0
        self.current = self.callers = self._named("caller")
        monkeypatch.setattr(torch.cuda, "Stream", self._new)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)

    def _named(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append((name, "waits for", other.name)))

    def _new(self, device: object = None) -> SimpleNamespace:
        self.made += 1
        return self._named(f"side {self.made}")

    @contextmanager
    def _enter(self, stream: SimpleNamespace):
        before, self.current = self.current, stream
        yield
        self.current = before

    def post(self, what: str):
        def post() -> str:
            self.log.append((self.current.name, "posts", what))
            return what

        return post

    def wait(self, what: str) -> None:
        self.log.append((self.current.name, "waits for", what))


def test_a_batch_after_one_of_another_channel_waits_for_it_in_a_side_stream(monkeypatch):
    cuda, order = FakeCuda(monkeypatch), streams.StreamOrder()
    assert order.after_others("row", cuda.post("row 1"), cuda.wait) == "row 1"
    assert order.after_others("column", cuda.post("column 1"), cuda.wait) == "column 1"
    assert cuda.log == [
        ("caller", "posts", "row 1"),
        ("side 1", "waits for", "caller"),  # what the batch sends is made there
        ("side 1", "waits for", "row 1"),
        ("side 1", "posts", "column 1"),
    ]
    assert cuda.current is cuda.callers


def test_the_callers_stream_never_waits_for_another_channels_batch(monkeypatch):
    """It would hold up every block that is launched after it."""
    cuda, order = FakeCuda(monkeypatch), streams.StreamOrder()
    for number, channel in enumerate(["row", "column", "row", "row", "column"]):
        order.after_others(channel, cuda.post(f"batch {number}"), cuda.wait)
    assert not any(who == "caller" and what == "waits for" for who, what, _ in cuda.log)
    assert [what for _, kind, what in cuda.log if kind == "posts"] == [f"batch {n}" for n in range(5)]
    assert cuda.made == 1  # one side stream, not one a batch
    # Each change of channel waits for the very last batch before it.
    waits = [what for who, kind, what in cuda.log if kind == "waits for" and what != "caller"]
    assert waits == ["batch 0", "batch 1", "batch 3"]


def test_batches_of_one_channel_are_posted_from_the_callers_stream(monkeypatch):
    """Its communicator keeps them in order by itself."""
    cuda, order = FakeCuda(monkeypatch), streams.StreamOrder()
    for number in range(3):
        order.after_others("row", cuda.post(str(number)), cuda.wait)
    assert cuda.log == [("caller", "posts", str(number)) for number in range(3)]
    assert cuda.made == 0


def staged_and_not(cases: list[Case]) -> list[str]:
    """What differs between the two routes, on one gloo rank; empty where nothing does."""
    wrong = []
    original, made = streams.Staged, []

    def staged(device: torch.device, batch: list) -> streams.Staged:
        made.append(len(batch))
        return original(device, batch)

    for case in cases:
        groups = mesh_groups(case.tile)
        want, sent = run_mesh(case, groups), dict(groups.counters.sent)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "route_of", lambda device, group: streams.Route.STAGED)
            patch.setattr(streams, "Staged", staged)
            got = run_mesh(case, groups)
        if not all(map(torch.equal, got, want)) or groups.counters.sent != sent or not made:
            wrong.append(f"{case}: {len(made)} batches staged, sent {groups.counters.sent}, should be {sent}")
        made.clear()
    return wrong


def test_through_host_memory_the_result_is_the_same_bit_for_bit(ranks):
    cases = [
        Case(s=64, tile=tile, kv_heads=2, dtype=dtype, exchange=exchange, b=2)
        for tile in ("1x4", "2x2", "4x1")
        for dtype in (torch.float32, torch.bfloat16)
        for exchange in EXCHANGES
    ]
    assert ranks(4).run(staged_and_not, cases, timeout=60) == [[]] * 4


def fake_group(*devices: str, backend: str | None) -> SimpleNamespace:
    """A process group whose backend for every device is called so; None: it has none."""

    def get(device: torch.device) -> SimpleNamespace:
        if backend is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: backend)

    return SimpleNamespace(_get_backend=get, _device_types=[torch.device(device) for device in devices])


def test_route_by_device_and_backend():
    assert streams.route_of(CPU, fake_group("cpu", backend="gloo")) is streams.Route.THREAD
    assert streams.route_of(CUDA, fake_group("cuda", backend="nccl")) is streams.Route.STREAM
    assert streams.route_of(CUDA, fake_group("cpu", "cuda", backend="gloo")) is streams.Route.STAGED


@pytest.mark.parametrize(("device", "backend"), [("cuda", "mpi"), ("cuda", None), ("xpu", "xccl"), ("meta", "gloo")])
def test_refuses_a_device_and_backend_that_no_way_is_known_for(device, backend):
    with pytest.raises(ValueError, match=f"{device} tensors with backend .*use CPU tensors, or CUDA"):
        streams.route_of(torch.device(device), fake_group(device, backend=backend))


def test_a_channel_holds_its_buffers_until_they_were_waited_for(monkeypatch):
    """Memory that is handed out again under a transfer on another stream would be overwritten."""
    events: list[str] = []
    work = SimpleNamespace(wait=lambda: events.append("waited"))
    monkeypatch.setattr(comm.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(comm.dist, "P2POp", lambda op, buffer, peer, group: None)
    monkeypatch.setattr(comm.dist, "batch_isend_irecv", lambda ops: [work])  # one for all, as NCCL gives
    monkeypatch.setattr(streams, "route_of", lambda device, group: streams.Route.STREAM)
    channel = comm.ChannelComm("row", fake_group("cuda", backend="nccl"), {0: 0, 1: 1}, 0, comm.Counters())
    batches = []
    for chunk in range(2):
        batch = [(Transfer(Payload.Q, chunk, 1, send), torch.zeros(8)) for send in (True, False)]
        batches.append([weakref.ref(buffer) for _, buffer in batch])
        channel.start(batch, "step 0", "forward")
        del batch
    gc.collect()
    assert all(alive() is not None for batch in batches for alive in batch)
    assert events == []  # nobody waits at the start
    channel.finish()
    gc.collect()
    assert [alive() for alive in batches[0]] == [None, None]
    assert all(alive() is not None for alive in batches[1])
    channel.finish()
    assert events == ["waited"] * 2
    gc.collect()
    assert [alive() for alive in batches[1]] == [None, None]


def test_a_time_limit_for_batches_is_refused_with_nccl_only():
    nccl = fake_group("cuda", backend="nccl")
    with pytest.raises(ValueError, match=r"timeout 3\.5 with NCCL.*init_process_group\(timeout="):
        comm.check_timeout(nccl, 3.5)
    comm.check_timeout(nccl, None)
    comm.check_timeout(fake_group("cpu", "cuda", backend="gloo"), 3.5)
    comm.check_timeout(fake_group("cpu", backend="gloo"), 3.5)


def out_of_step(plan: Plan) -> list[str]:
    """Where the ranks of a plan do not post in lockstep; see Note [Streams].

    All have the same sequence of (event, channel), and the partners of the transfers in a rank's batch number k of a
    channel are in their own batches number k of it: nobody waits for a batch that its peer posts behind another one.
    """
    programs = [plan.program(rank) for rank in range(plan.tile.size)]

    def sequence(program) -> list[tuple[EventKind, Channel | None]]:
        return [(e.kind, e.transfers[0].payload.channel if e.transfers else None) for e in program]

    found = [
        f"rank {rank} has another sequence" for rank, p in enumerate(programs) if sequence(p) != sequence(programs[0])
    ]
    ends: dict[bool, Counter] = {True: Counter(), False: Counter()}  # of transfers: where sent, where received
    for rank, program in enumerate(programs):
        number = dict.fromkeys(Channel, 0)
        for event in program:
            if event.kind is EventKind.START:
                channel = event.transfers[0].payload.channel
                for t in event.transfers:
                    source, target = (rank, t.peer) if t.send else (t.peer, rank)
                    ends[t.send][number[channel], channel, source, target, t.payload, t.chunk] += 1
                number[channel] += 1
    alone = (ends[True] - ends[False]) + (ends[False] - ends[True])
    found += [f"{c.value} batch {k}: {p.value} {i} from {s} to {t} has no partner" for k, c, s, t, p, i in alone]
    return found


@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("direction", Direction)
def test_all_ranks_of_every_plan_post_in_lockstep(direction, exchange, links):
    """Every tile a x b with a*b <= 36: what keeps two communicators from a deadlock in one line of launches."""
    costs = replace(nominal_costs(direction), links=links)
    tiles = [TileShape(a, b) for a in range(1, 37) for b in range(1, 36 // a + 1)]
    wrong = {}
    for tile in tiles:
        plan = make_plan(tile, direction, exchange, costs)
        assert plan.links == links
        if found := out_of_step(plan):
            wrong[str(tile)] = found[0]
    assert wrong == {}


def test_a_rank_with_an_order_of_its_own_is_out_of_step():
    """Rank 0 of 2x2 posts its column first, and another plan has its two rounds of a column exchanged."""
    plan = make_plan(TileShape(2, 2), Direction.FORWARD, "direct")
    steps = list(plan.steps(0))
    assert len([s for s in steps if s.transfers]) >= 2
    first, second, *rest = steps
    swapped = replace(first, transfers=second.transfers), replace(second, transfers=first.transfers), *rest
    assert any("another sequence" in text for text in out_of_step(replace(plan, explicit={0: swapped})))
    plan = make_plan(TileShape(1, 3), Direction.FORWARD, "direct")
    posting = [n for n, step in enumerate(plan.steps(0)) if step.transfers][:2]
    steps = list(plan.steps(0))
    one, two = (steps[n].transfers for n in posting)
    steps[posting[0]], steps[posting[1]] = (
        replace(steps[n], transfers=t) for n, t in zip(posting, (two, one), strict=True)
    )
    assert any("has no partner" in text for text in out_of_step(replace(plan, explicit={0: tuple(steps)})))


class FakeEvent:
    """A CUDA event: it happens at the time that its stream shows when it is recorded, if that time has come."""

    now = 0.0  # ms, of the GPU

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = torch.cuda.current_stream().at

    def query(self) -> bool:
        return self.at <= FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_the_clock_tells_transfer_from_waiting_and_never_waits_for_the_gpu(monkeypatch):
    """The stream waits from 4 to 10 ms and from 15 to 18; NCCL says that the batches took 10 and 8 ms."""
    caller = SimpleNamespace(at=0.0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: caller)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: pytest.fail("a stream of its own would hold up blocks"))
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")

    def wait_until(at: float):
        def wait() -> None:
            caller.at = max(caller.at, at)

        return wait

    def work(end: float, took: float) -> SimpleNamespace:
        return SimpleNamespace(is_completed=lambda: end <= FakeEvent.now, _get_duration=lambda: took)

    clock, key = streams.StreamClock(), ("forward", "row")
    clock.posted(key, [work(10, 10)])
    clock.posted(key, [work(18, 8)])
    caller.at = 4.0
    clock.waited_for(wait_until(10))
    caller.at = 15.0
    clock.waited_for(wait_until(18))
    FakeEvent.now = 12.0
    assert clock.read() == (pytest.approx(6e-3), {key: pytest.approx(10e-3)})
    assert clock.read() == (0.0, {})
    FakeEvent.now = 20.0
    assert clock.read() == (pytest.approx(3e-3), {key: pytest.approx(8e-3)})

    monkeypatch.delenv("TORCH_NCCL_ENABLE_TIMING")
    silent = streams.StreamClock()
    silent.posted(key, [work(0, 1)])
    assert silent.read() == (0.0, {})


def test_a_channel_on_streams_gives_its_batches_to_the_clock(monkeypatch):
    seen = []
    work = SimpleNamespace(wait=lambda: seen.append("wait"))
    monkeypatch.setattr(streams, "route_of", lambda device, group: streams.Route.STREAM)
    monkeypatch.setattr(comm.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(comm.dist, "batch_isend_irecv", lambda ops: [work])
    monkeypatch.setattr(comm.dist, "P2POp", lambda *args: args)
    counters = comm.Counters()
    counters.clock = SimpleNamespace(
        posted=lambda key, works: seen.append((key, works)),
        waited_for=lambda wait: seen.append("stream waits") or wait(),
        read=lambda: (0.25, {("forward", "row"): 0.5}),
    )
    channel = comm.ChannelComm("row", object(), {0: 0, 1: 1}, 0, counters)
    channel.start([(Transfer(Payload.Q, 0, 1, True), torch.ones(4))], "forward step 0", "forward")
    channel.finish()
    assert seen == [(("forward", "row"), [work]), "stream waits", "wait"]
    counters.read_clock()
    assert (counters.waited, counters.busy) == (0.25, {("forward", "row"): 0.5})  # and none of the host's time
