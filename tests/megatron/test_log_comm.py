"""--mesh-log-comm: the line, and what TensorBoard and W&B get through Megatron's own writers."""

from __future__ import annotations

import argparse
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_mesh_cp.comm import Counters
from megatron_mesh_cp.megatron.config import MeshConfig
from megatron_mesh_cp.tile import TileShape

MESH = MeshConfig(TileShape(2, 2), TileShape(2, 2))


@pytest.fixture
def log_comm():
    pytest.importorskip("megatron.training", reason="the megatron-core here ships no megatron.training")
    from megatron_mesh_cp.megatron import log_comm

    return log_comm


def counted() -> Counters:
    """Two iterations of two layers: 4 calls each way."""
    counters = Counters(waited=0.5)
    counters.sent = {
        ("forward", "row"): 400,
        ("forward", "column"): 800,
        ("backward", "row"): 1200,
        ("backward", "column"): 1600,
    }
    counters.calls = {"forward": 4, "backward": 4}
    counters.busy = {("forward", "row"): 1e-6, ("backward", "row"): 3e-6, ("backward", "column"): 2e-6}
    return counters


def test_the_report_is_per_iteration_and_the_counters_start_again(log_comm):
    counters = counted()
    report = log_comm.CommReport.take([counters, counted()], iterations=2)
    assert report.per_call == {"forward": 300, "backward": 700}
    line = report.line(7, MESH)
    assert line == (
        "[mesh-cp] comm iteration 7 | bytes per rank and layer: forward 300 backward 700 | an iteration: 4000 bytes, "
        "waited 500.0 ms | link rate: row 0.4 GB/s column 1.2 GB/s"
    )
    assert report.scalars() == pytest.approx(
        {
            "mesh-cp/bytes-per-iteration": 4000,
            "mesh-cp/exposed-wait-ms": 500,
            "mesh-cp/link-rate-row-GB-s": 0.4,
            "mesh-cp/link-rate-column-GB-s": 1.2,
        }
    )
    again = log_comm.CommReport.take([counters], iterations=1)
    assert (again.sent, again.waited, again.rates) == (0, 0.0, {})
    assert "link rate: nothing sent" in again.line(8, MESH)
    on_cuda = Counters(sent={("forward", "row"): 4}, calls={"forward": 1})
    assert "link rate: not measured" in log_comm.CommReport.take([on_cuda], iterations=1).line(9, MESH)


def test_on_cuda_counting_begins_with_the_clocks(log_comm, monkeypatch):
    counters = counted()
    monkeypatch.setattr(log_comm, "all_shared_groups", lambda: (SimpleNamespace(counters=counters),))
    assert not log_comm._start_clocks()
    assert counters.clock is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert log_comm._start_clocks()
    assert counters.clock is not None
    assert counters.sent == {}
    assert not log_comm._start_clocks()


class Writer:
    def __init__(self) -> None:
        self.said: list[tuple[int, dict[str, float]]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:  # TensorBoard's
        self.said.append((iteration, {name: value}))

    def log(self, scalars: dict[str, float], iteration: int) -> None:  # W&B's
        self.said.append((iteration, scalars))


def test_megatrons_writers_get_the_figures_at_its_log_interval(log_comm, monkeypatch, capsys):
    from megatron.training import global_vars, training

    board, wandb = Writer(), Writer()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", argparse.Namespace(log_interval=2))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    counters = Counters()
    monkeypatch.setattr(log_comm, "all_shared_groups", lambda: (SimpleNamespace(counters=counters),))
    monkeypatch.setattr(training, "training_log", lambda loss_dict, iteration: "Megatron's own result")
    put_back = log_comm.wrap_training_log(MESH)
    for iteration in (1, 2, 3, 4):
        counters.sent = {("forward", "row"): 1000}
        counters.calls = {"forward": 1}
        assert training.training_log({}, iteration) == "Megatron's own result"
    put_back()
    assert [iteration for iteration, _ in wandb.said] == [2, 4]
    assert [scalars["mesh-cp/bytes-per-iteration"] for _, scalars in wandb.said] == [500, 500]
    assert {name for _, scalars in board.said for name in scalars} == set(wandb.said[0][1])
    assert [iteration for iteration, _ in board.said] == [2] * 2 + [4] * 2
    assert len(re.findall(r"comm iteration \d+", capsys.readouterr().out)) == 2
