"""The recipes of configs/: Megatron takes them at their real size, they fit their GPUs, their headers are not stale."""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_mesh_cp.cli.launch import Launch
from megatron_mesh_cp.cli.main import main
from megatron_mesh_cp.cli.pretrain import plan_launch
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.megatron.config import MeshConfig
from megatron_mesh_cp.megatron.planned_memory import MARGIN, PlannedMemory, planned_memory
from megatron_mesh_cp.megatron.recipe import Recipe, RecipeError, load_recipe
from megatron_mesh_cp.megatron.row_in_node import check_row_in_node
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import TIE, decide, evaluate
from megatron_mesh_cp.units import human

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
ON_GPUS = [name for name in RECIPES if name != "quickstart.yaml"]
NEAR_BEST = 0.02  # a recipe's tile may take so much longer than the fastest

# Parameters of the models as their makers give them, and what the recipe's own arithmetic may be off.
PUBLISHED = {
    "llama3-8b-128k-32gpu.yaml": 8.03e9,
    "llama3-8b-1m-256gpu.yaml": 8.03e9,
    "llama3-70b-256k-256gpu.yaml": 70.6e9,
    "qwen3-30b-a3b-256k-256gpu.yaml": 30.5e9,
    "gpt-7b-1m-256gpu.yaml": 6.7e9,  # GPT-3 6.7B, whose learned positions (8 M) it does not have
}


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """What a user exports: a data set as far as the launcher looks, a tokenizer's name, a folder for the run."""
    folder = tmp_path_factory.mktemp("configs")
    for end in (".bin", ".idx"):
        (folder / f"text{end}").touch()
    text = str(folder / "text")
    return {
        **os.environ,
        **{"DATA_PATH": text, "MESH_CP_DATA": text, "TOKENIZER": "some/tokenizer", "RUN_DIR": str(folder / "run")},
    }


@pytest.fixture(scope="module")
def launch_of(environ):
    """The checked job of a recipe, by its file name."""
    return cache(lambda name: plan_launch(CONFIGS / name, environ=environ, elsewhere=True))


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_takes_every_recipe_at_its_real_world_size(launch_of, name):
    launch = launch_of(name)
    recipe = load_recipe(CONFIGS / name, environ=launch.env)
    assert launch.ranks == recipe.ranks
    assert launch.mesh.size == launch.args.context_parallel_size
    if name in ON_GPUS:
        assert f"-{launch.ranks}gpu" in name
        assert recipe.ranks_per_node == load_cluster(launch.args.mesh_cluster).gpus_per_node
        args = launch.validated
        assert (args.bf16, args.transformer_impl, args.ckpt_format) == (True, "transformer_engine", "torch_dist")
        assert args.save == args.load == f"{launch.env['RUN_DIR']}/checkpoints"
        assert args.sequence_parallel == (args.tensor_model_parallel_size > 1)
        assert args.mesh_tile_shape != "auto"
        assert args.mesh_tile_shape_backward not in ("auto", "same")


@pytest.mark.parametrize("name", ON_GPUS)
def test_megatron_core_takes_the_model(launch_of, name):
    """The configuration that ranks build after Megatron's argument checks; what needs Transformer Engine is off."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = copy.copy(launch_of(name).validated)
    args.apply_rope_fusion = args.moe_permute_fusion = False
    config = core_transformer_config_from_args(args)
    tile = TileShape.parse(args.mesh_tile_shape)
    assert config.context_parallel_size == tile.size
    assert tuple(config.hierarchical_context_parallel_sizes) == tile.levels


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_is_of_the_model_that_it_names(launch_of, name):
    launch = launch_of(name)
    parameters = planned_memory(launch.validated, launch.mesh, launch.ranks).parameters
    assert parameters == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_recipe_fits_its_gpu_with_a_tenth_to_spare(launch_of, name):
    launch = launch_of(name)
    planned = planned_memory(launch.validated, launch.mesh, launch.ranks)
    cluster = load_cluster(launch.args.mesh_cluster)
    assert MARGIN == 0.10
    assert planned.fits(cluster), planned.text(cluster)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_header_says_what_is_computed_now(launch_of, name):
    """Every line `# predicted:` and `# by:`; a stale one is shown beside what it must say."""
    text = (CONFIGS / name).read_text()
    header = text[: text.index("\nENV_VARS:")].splitlines()
    assert all(line.startswith("#") for line in header)
    said = [line for line in header if re.match(r"# (predicted|by):", line)]
    assert said == predicted_lines(launch_of(name))


def predicted_lines(launch: Launch) -> list[str]:
    """What the header of a recipe must say, recomputed; the tile is compared with the fastest of all on its cluster."""
    args, mesh = launch.validated, launch.mesh
    cluster, tp = load_cluster(args.mesh_cluster), args.tensor_model_parallel_size
    best = decide(mesh.size, mesh.shape, cluster, tp=tp)
    own, others = (
        1e3 * sum(evaluate(tile[d], d, exchange[d], mesh.shape, cluster, tp=tp).seconds for d in Direction)
        for tile, exchange in (
            (
                {Direction.FORWARD: mesh.tile, Direction.BACKWARD: mesh.tile_backward},
                {d: mesh.exchange_of(d) for d in Direction},
            ),
            (dict.fromkeys(Direction, TileShape(1, mesh.size)), dict.fromkeys(Direction, "shift")),
        )
    )
    fastest = 1e3 * (best.forward.seconds + best.backward.seconds)
    # `decide` takes the fewest bytes within TIE of the fastest
    assert own <= fastest * (1 + NEAR_BEST) / (1 + TIE), f"{best.forward} takes {fastest} ms, the recipe's {own} ms"
    sent = mesh.bytes_per_call()
    total, ring = sent["forward"] + sent["backward"], sent["ring_forward"] + sent["ring_backward"]
    tiles = f"{mesh.tile} {mesh.exchange_of(Direction.FORWARD)}"
    back = f"{mesh.tile_backward} {mesh.exchange_of(Direction.BACKWARD)}"
    memory = planned_memory(args, mesh, launch.ranks)
    weights, activations, attention = (x / 1e9 for x in (memory.weights, memory.activations, memory.attention))
    options = {
        "cp": mesh.size,
        "seq-len": args.seq_length,
        "heads": args.num_attention_heads,
        "kv-heads": mesh.shape.kv_heads * tp,
        "head-dim": mesh.shape.head_dim,
        "tp": tp,
        "cluster": args.mesh_cluster,
    }
    return [
        f"# predicted: tile {tiles}, backward {back}; `tune` chooses {best.forward}, backward {best.backward}",
        f"# predicted: attention of a layer, forward + backward, {own:.1f} ms; `tune`'s {fastest:.1f} ms; a ring "
        f"{others:.1f} ms",
        f"# predicted: sent per rank, layer and microbatch {human(total)}; a ring {human(ring)} "
        f"({100 * (1 - total / ring):.1f} % less)",
        f"# predicted: memory {memory.total / 1e9:.1f} GB of {cluster.memory / 1e9:g} GB: weights, gradients, "
        f"optimizer {weights:.1f}, activations {activations:.1f}, attention {attention:.1f}",
        "# by: mesh-cp tune " + " ".join(f"--{flag} {value}" for flag, value in options.items()),
    ]


def test_the_quoted_command_says_what_the_header_says(capsys):
    text = (CONFIGS / "llama3-8b-128k-32gpu.yaml").read_text()
    command = re.search(r"^# by: mesh-cp (.*)$", text, re.MULTILINE)[1]
    assert main([*command.split(), "--json"]) == 0
    decision = json.loads(capsys.readouterr().out)["decision"]
    a, b = decision["forward"]["tile"]
    sent = decision["forward"]["bytes"] + decision["backward"]["bytes"]
    assert f"# predicted: tile {a}x{b} {decision['forward']['exchange']}," in text
    assert f"`tune`'s {decision['time_ms']:.1f} ms;" in text
    assert f"microbatch {human(sent)};" in text


# What is wrong with a job at its real size


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--context-parallel-size", "48"], ["RANKS: 32", "context 48", "= 96"]),
        (["--pipeline-model-parallel-size", "3"], ["RANKS: 32", "pipeline 3", "= 96"]),
        (["--global-batch-size", "31", "--context-parallel-size", "8", "--mesh-tile-shape", "2x4"], ["tile", "2x8"]),
        (["--mesh-tile-shape", "4x8"], ["context_parallel_size 16", "4x8 = 32"]),
        (["--data-path", "/nope/text"], ["--data-path /nope/text", "/nope/text.bin"]),
        (["--seq-length", "131080"], ["--seq-length 131080", "32"]),
        (["--attention-dropout", "0.1"], ["--attention-dropout 0.1"]),
        (["--mesh-cluster", "h100-ndx"], ["h100-ndx", "h100-ndr"]),
        (
            ["--mesh-tile-shape", "8x2", "--mesh-tile-shape-backward", "8x2"],
            ["--mesh-tile-shape 8x2", "size 2 = 16", "RANKS_PER_NODE: 8", "8x2t", "4x4", "drop ROW_IN_NODE"],
        ),
        (["--mesh-tile-shape-backward", "8x2"], ["--mesh-tile-shape-backward 8x2", "= 16", "8x2t"]),
    ],
)
def test_rejects_what_does_not_fit_the_real_size(environ, more, says):
    with pytest.raises(ValueError) as error:
        plan_launch(CONFIGS / "llama3-8b-128k-32gpu.yaml", more, environ=environ, elsewhere=True)
    for words in says:
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variable", ["DATA_PATH", "TOKENIZER", "RUN_DIR"])
def test_names_a_variable_that_is_not_set(environ, variable):
    less = {key: value for key, value in environ.items() if key != variable}
    with pytest.raises(RecipeError, match=rf"needs \$\{{{variable}\}}, which is not set; `export {variable}="):
        plan_launch(CONFIGS / ON_GPUS[0], environ=less, elsewhere=True)


# RANKS_PER_NODE and ROW_IN_NODE


def recipe_of(folder: Path, text: str) -> Recipe:
    (folder / "recipe.yaml").write_text(text + "\nMODEL_ARGS: {}\n")
    return load_recipe(folder / "recipe.yaml", environ={})


def test_node_keys_are_read(tmp_path):
    recipe = recipe_of(tmp_path, "RANKS: 32\nRANKS_PER_NODE: 8\nROW_IN_NODE: true")
    assert (recipe.ranks, recipe.ranks_per_node, recipe.row_in_node) == (32, 8, True)
    assert recipe_of(tmp_path, "RANKS: 4\nRANKS_PER_NODE: 8").ranks_per_node == 8
    assert not recipe_of(tmp_path, "ROW_IN_NODE: false").row_in_node


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RANKS: 12\nRANKS_PER_NODE: 8", ["RANKS: 12", "RANKS_PER_NODE: 8", "1 nodes hold 8", "2 hold 16"]),
        ("ROW_IN_NODE: true", ["recipe.yaml:1", "ROW_IN_NODE: true without RANKS_PER_NODE"]),
        ("RANKS_PER_NODE: 8\nROW_IN_NODE: 4", ["recipe.yaml:2", "ROW_IN_NODE must be true or false", "'4'"]),
        ("RANKS_PER_NODE: 8\nROW_IN_NODE: yes", ["ROW_IN_NODE: yes is ambiguous"]),
        ("RANKS_PER_NODE: 8\nROW_IN_NODE: [true]", ["ROW_IN_NODE must be true or false"]),
        ("RANKS_PER_NODE: many", ["RANKS_PER_NODE must be a whole number", "'many'"]),
        ("RANKS_PER_NODES: 8", ["'RANKS_PER_NODES'", "did you mean RANKS_PER_NODE?"]),
    ],
)
def test_rejects_node_keys_that_cannot_be_meant(tmp_path, text, says):
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, text)
    for words in says:
        assert words in str(error.value)


def checked(tile: str, tp: int, ranks: int, per_node: int | None = 8, backward: str | None = None) -> None:
    recipe = Recipe(Path("r.yaml"), {}, (), ranks, per_node, True)
    mesh = MeshConfig(TileShape.parse(tile), TileShape.parse(backward or tile))
    check_row_in_node(recipe, ranks, tp, mesh)


@pytest.mark.parametrize(
    ("tile", "tp", "ranks"), [("4x8", 2, 64), ("8x4", 1, 32), ("16x4t", 2, 128), ("1x32", 8, 256), ("4x2", 1, 8)]
)
def test_allows_a_consecutive_group_that_stays_inside_a_node(tile, tp, ranks):
    checked(tile, tp, ranks)


@pytest.mark.parametrize(
    ("tile", "tp", "backward", "says"),
    [
        ("8x4", 2, None, ["--mesh-tile-shape 8x4", "8 consecutive", "= 16", "try 8x4t, which", "4x8, the widest row"]),
        ("4x8t", 2, None, ["4x8t", "column group has 8", "try 4x8, which", "8x4t, the widest column group"]),
        ("4x8", 2, "16x2", ["--mesh-tile-shape-backward 16x2", "row group has 16", "16x2t"]),
        ("3x8", 1, None, ["3x8", "= 3 neighbours", "RANKS_PER_NODE: 8", "3x8t", "8x3"]),
        ("2x4", 16, None, ["= 32", "8 would split it; drop ROW_IN_NODE"]),
    ],
)
def test_rejects_a_consecutive_group_that_leaves_its_node(tile, tp, backward, says):
    """A row of 3 fits into 8, but the third one would begin in one node and end in the next."""
    with pytest.raises(ValueError) as error:
        checked(tile, tp, 32 * 3 * tp, backward=backward)
    for words in [*says, "drop ROW_IN_NODE"]:
        assert words in str(error.value)


def test_rejects_a_node_claim_without_a_tile_and_ranks_that_leave_a_node_partly_empty():
    recipe = Recipe(Path("r.yaml"), {}, (), None, 8, True)
    with pytest.raises(ValueError, match=r"no tile is known here: it needs --context-parallel-algo mesh"):
        check_row_in_node(recipe, 16, 1, None)
    with pytest.raises(ValueError, match=r"12 ranks with RANKS_PER_NODE: 8 .* start a whole number of nodes"):
        check_row_in_node(replace(recipe, row_in_node=False), 12, 1, None)


# Planned memory


@pytest.fixture
def plan_with(launch_of):
    """Planned memory of a recipe with some validated arguments changed."""

    def plan(name: str = "gpt-7b-1m-256gpu.yaml", ranks: int | None = None, **changes) -> PlannedMemory:
        launch = launch_of(name)
        args = copy.copy(launch.validated)
        for key, value in changes.items():
            assert hasattr(args, key), key
            setattr(args, key, value)
        return planned_memory(args, launch.mesh, ranks or launch.ranks)

    return plan


def test_memory_of_a_plain_gpt_is_the_textbook_sum(plan_with):
    """6 bytes a parameter and 12 over all ranks; 34 s h a layer; logits and the last norm at 4 bytes."""
    gpt = plan_with()
    tokens, hidden, layers, vocab = 4096, 4096, 32, 50304
    assert gpt.weights == pytest.approx(gpt.parameters * (6 + 12 / 256), rel=1e-6)
    embedding = tokens * (8 + hidden)
    assert gpt.activations == pytest.approx(tokens * hidden * 34 * layers + embedding + 4 * tokens * (hidden + vocab))
    assert gpt.total == gpt.weights + gpt.activations + gpt.attention


def test_memory_follows_what_megatrons_report_does_not_know(plan_with):
    whole = plan_with()
    layer = 34 * 4096 * 4096
    full = plan_with(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert whole.activations - full.activations == pytest.approx(32 * layer - 32 * 2 * 4096**2 - layer)
    two = plan_with(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert two.activations - full.activations == pytest.approx(layer - 16 * 2 * 4096**2)
    block = plan_with(recompute_granularity="full", recompute_method="block", recompute_num_layers=8)
    assert whole.activations - block.activations == pytest.approx(8 * layer - 8 * 2 * 4096**2 - layer)
    mlp = plan_with(recompute_granularity="selective", recompute_modules=["mlp"])
    assert whole.activations - mlp.activations == pytest.approx(31 * 16 * 4096**2)
    core = plan_with(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert core == whole
    gated = plan_with(swiglu=True)
    assert gated.activations - whole.activations == pytest.approx(32 * 8 * 4096**2)
    grouped = plan_with(group_query_attention=True, num_query_groups=8)
    assert grouped.activations == whole.activations  # fewer KV heads are no more than the report has
    assert plan_with(use_distributed_optimizer=False).weights == pytest.approx(18 * whole.parameters, rel=1e-6)
    several = plan_with(num_distributed_optimizer_instances=4)  # each is sharded over a quarter of the ranks
    assert several.weights == pytest.approx(whole.parameters * (6 + 12 / 64), rel=1e-6)
    longer = plan_with(seq_length=2 * 1048576)
    assert longer.activations == pytest.approx(2 * whole.activations)


def test_memory_knows_stages_and_shards(plan_with):
    dense = "llama3-70b-256k-256gpu.yaml"
    two = plan_with(dense)
    four = plan_with(dense, pipeline_model_parallel_size=4, context_parallel_size=8)
    assert four.weights < 0.6 * two.weights
    # twice the tokens in as many layers in flight; the one layer computed again counts twice as well
    assert four.activations == pytest.approx(2 * two.activations, rel=0.02)
    single = plan_with(
        dense, global_batch_size=1
    )  # one microbatch in flight: the last stage, with the logits, is fuller
    again, logits = 16384 * 6 * 28672 / 8, 4 * 16384 * (8192 + 128256) / 8
    assert single.activations == pytest.approx((two.activations - again) / 2 + again + logits, rel=0.005)
    interleaved = plan_with(dense, virtual_pipeline_model_parallel_size=2)
    assert interleaved.activations > 1.2 * two.activations
    wide = plan_with(dense, padded_vocab_size=10**7)  # then the last stage is the fuller one
    assert wide.activations > 4 * 16384 * 10**7 / 8
    alone = plan_with(dense, sequence_parallel=False, recompute_granularity=None)
    per_layer = 16384 * 8192 * (10 + 24 / 8)
    assert alone.activations == pytest.approx(1.05 * 80 * per_layer, rel=0.02)
    more = plan_with("qwen3-30b-a3b-256k-256gpu.yaml", expert_model_parallel_size=16)
    less = plan_with("qwen3-30b-a3b-256k-256gpu.yaml")
    experts = 48 * 128 * 3 * 2048 * 768
    expected = experts / 8 * (6 + 12 / 32) - experts / 16 * (6 + 12 / 16)
    assert less.weights - more.weights == pytest.approx(expected, rel=1e-6)
    moe = plan_with("qwen3-30b-a3b-256k-256gpu.yaml", recompute_modules=["moe"])
    assert moe.activations < 0.5 * less.activations


def test_memory_of_a_moe_layer_counts_what_top_k_experts_keep(plan_with):
    """A token: 18 h as Megatron has it, wide heads and their norms, then 8 times its copies and gated feed-forward."""
    name = "qwen3-30b-a3b-256k-256gpu.yaml"
    hidden, q, kv = 2048, 4096, 512
    token = 18 * hidden + (2 * (2 * q + 2 * kv) - 8 * hidden) + 2 * (q + kv) + 8 * (6 * 768 + 4 * hidden)
    less = plan_with(name).activations - plan_with(name, num_layers=47, moe_layer_freq=[1] * 47).activations
    assert less == pytest.approx(4096 * token, abs=2)


def test_headers_give_true_reasons_for_the_parallel_sizes(plan_with):
    cluster = load_cluster("h100-ndr")
    name = "llama3-8b-128k-32gpu.yaml"
    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 32, "sequence_parallel": False}
    assert not plan_with(name, **sizes).fits(cluster)
    assert plan_with(name, **sizes).fits(cluster, margin=0.0)
    name = "llama3-70b-256k-256gpu.yaml"
    sizes = {"pipeline_model_parallel_size": 1, "context_parallel_size": 32}
    assert plan_with(name, **sizes).weights > 0.6 * cluster.memory
    assert not plan_with(name, recompute_granularity=None).fits(cluster)


def test_memory_is_told_of_a_gpu_with_a_margin(plan_with):
    cluster = load_cluster("h100-ndr")
    assert PlannedMemory(60, 10, 2, 1).fits(replace(cluster, memory=80))
    assert not PlannedMemory(60, 10, 3, 1).fits(replace(cluster, memory=80))
    assert PlannedMemory(60, 10, 3, 1).fits(replace(cluster, memory=80), margin=0.0)
    assert plan_with().text(cluster).startswith("62.8 GB of 80 GB: weights, gradients and optimizer 40.2 GB")


def test_memory_is_refused_where_it_is_not_known(plan_with):
    with pytest.raises(ValueError, match=r"HuggingFaceTokenizer without --vocab-size: .* give --vocab-size too"):
        plan_with(vocab_size=None)
    for name in ("multi_latent_attention", "use_megatron_fsdp"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag}: Megatron's theoretical memory report does not know it"):
            plan_with(**{name: True})


def test_memory_of_megatrons_own_context_parallelism_has_no_plan(launch_of):
    launch = launch_of("gpt-7b-1m-256gpu.yaml")
    assert planned_memory(launch.validated, None, launch.ranks).attention == 0
