"""Ranks with Transformer Engine's real Python over the emulated extension: a pool of their own, as it changes torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import te_cases
from rank_pool import RankPool


@pytest.fixture(scope="session")
def _te_pools() -> Iterator[list[RankPool]]:
    pools: list[RankPool] = []
    yield pools
    for pool in pools:
        pool.kill()


@pytest.fixture
def te_ranks(_te_pools: list[RankPool]) -> Callable[[], RankPool]:
    """A pool of four gloo ranks with Transformer Engine; a broken one is replaced."""

    if find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")

    def get() -> RankPool:
        if not _te_pools or _te_pools[-1].broken:
            _te_pools.append(RankPool(4))
            _te_pools[-1].run(te_cases.emulate, timeout=180)
        return _te_pools[-1]

    return get
