"""Groups as Megatron makes them: hierarchical CP for the tile, the same function again for another backward tile."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from mesh_cases import Case, errors
from rank_pool import passing_groups

from megatron_mesh_cp import MeshGroups, TileShape

pytestmark = pytest.mark.compat


@passing_groups()
def with_megatron(case: Case, tp: int) -> dict:
    """TP 2 x CP 4 on 8 ranks: CP ranks are two apart; groups from Megatron, parity, and what was created."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_mesh_cp.megatron import groups as room

    tile, backward = TileShape.parse(case.tile), TileShape.parse(case.tile_backward)
    undo = room.after_model_parallel(lambda: made.extend(room.make_backward_groups(backward)))
    made: list[list[int]] = []
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            context_parallel_size=tile.size,
            hierarchical_context_parallel_sizes=[tile.a, tile.b],
            create_gloo_process_groups=False,
        )
        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp", "hcp"])
        groups = MeshGroups.from_megatron(collection, backward, room.backward_groups_of(backward))
        refusals = []
        for attempt in (
            lambda: MeshGroups.from_megatron(collection, backward),
            lambda: MeshGroups.from_megatron(collection, backward, list(reversed(room.backward_groups_of(backward)))),
            lambda: MeshGroups.from_megatron(type("Empty", (), {"cp": collection.cp, "hcp": None})()),
        ):
            try:
                attempt()
                refusals.append("accepted")
            except ValueError as error:
                refusals.append(str(error))
        return {
            "errors": errors(case, groups),
            "created": made,
            "cp": dist.get_process_group_ranks(collection.cp),
            "refusals": refusals,
        }
    finally:
        undo()
        room.forget_groups()
        parallel_state.destroy_model_parallel()


def test_groups_of_megatron_carry_forward_and_backward_and_are_made_alike_on_all_ranks(ranks):
    """PT #130102, MLM PR #5079: new_group called in different orders; MLM #3132: groups that do not exist."""
    answers = ranks(8).run(with_megatron, Case(s=24, tile="2x2", tile_backward="4x1", kv_heads=2), 2, timeout=120)
    assert all(a["created"] == answers[0]["created"] for a in answers)
    # Two CP groups, 0 2 4 6 and 1 3 5 7; of each first the row, then the columns of tile 4x1.
    assert answers[0]["created"] == [[0, 2, 4, 6], [0], [2], [4], [6], [1, 3, 5, 7], [1], [3], [5], [7]]
    for rank, answer in enumerate(answers):
        assert answer["cp"] == [rank % 2 + 2 * i for i in range(4)]
        assert max(answer["errors"].values()) < 1e-10
        assert "needs groups of its own" in answer["refusals"][0]
        assert "row group" in answer["refusals"][1]
        assert "hierarchical_context_parallel_sizes=[a, b]" in answer["refusals"][2]


@passing_groups()
def other_settings(own: dict[int, str]) -> str:
    """What initialize_model_parallel says where the ranks have chosen other tiles."""
    from megatron.core import parallel_state

    from megatron_mesh_cp.megatron import groups as room
    from megatron_mesh_cp.megatron.config import MeshConfig

    tile, _, backward = own[dist.get_rank()].partition(" backward ")
    mesh = MeshConfig(TileShape.parse(tile), TileShape.parse(backward or tile))
    undo = room.after_model_parallel(lambda: None, said=mesh.said())
    try:
        parallel_state.initialize_model_parallel(
            context_parallel_size=4, hierarchical_context_parallel_sizes=list(mesh.tile.levels)
        )
        return "made"
    except ValueError as error:
        return str(error)
    finally:
        undo()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("other", ["4x1", "2x2t", "2x2 backward 1x4"])
def test_ranks_that_chose_other_tiles_are_told_so_before_any_group_is_made(ranks, other):
    """A cluster file that differs on one node; other groups would wait for each other for ever."""
    answers = ranks(4).run(other_settings, {0: "2x2", 1: "2x2", 2: other, 3: other}, timeout=60)
    for answer in answers:
        assert "the ranks disagree" in answer
        assert "on ranks 0, 1; " in answer
        assert "on ranks 2, 3; " in answer
        assert "--mesh-cluster" in answer
    assert ranks(4).run(other_settings, dict.fromkeys(range(4), "2x2"), timeout=60) == ["made"] * 4
