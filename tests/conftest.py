"""Shared fixtures: pools of gloo ranks that live as long as the test run; and skips that must not be."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: the tests are of CPU ranks, on a GPU machine too

from collections.abc import Callable, Iterator

import pytest
import required
import te_path
from rank_pool import RankPool


def _unskipped(report: pytest.TestReport | pytest.CollectReport) -> pytest.TestReport | pytest.CollectReport:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if name := required.missing(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason.removeprefix('Skipped: ')}, and MESH_CP_REQUIRE has {name}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _unskipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    with te_path.visible(collector.path):
        return _unskipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    with te_path.visible(item.path):
        return (yield)


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.kill()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """ranks(n): a pool of n gloo ranks, shared by all tests; a broken one is replaced."""

    def get(size: int) -> RankPool:
        if size not in _pools or _pools[size].broken:
            _pools[size] = RankPool(size)
        return _pools[size]

    return get
