"""Shared fixtures: pools of gloo ranks that live as long as the test run."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: the tests are of CPU ranks, on a GPU machine too

from collections.abc import Callable, Iterator

import pytest
from rank_pool import RankPool


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
