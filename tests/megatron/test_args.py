"""The flags on Megatron's own parser: what they resolve to, and what is refused with a way out."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
from packaging.version import Version

from megatron_mesh_cp import cluster as cluster_module
from megatron_mesh_cp.cluster import load_cluster
from megatron_mesh_cp.megatron.args import add_args, resolve_args
from megatron_mesh_cp.megatron.versions import check_megatron, megatron_version
from megatron_mesh_cp.plan import Direction
from megatron_mesh_cp.tile import TileShape
from megatron_mesh_cp.tune import rank_candidates

pytestmark = pytest.mark.compat

BASE = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --attention-dropout 0 --no-create-attention-mask-in-dataloader --transformer-impl local
    --context-parallel-size 4 --context-parallel-algo mesh
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    pytest.importorskip("megatron.training", reason="this megatron-core ships no megatron.training")
    from megatron.training.arguments import add_megatron_arguments

    return add_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.fixture
def resolve(parser):
    return lambda flags="": resolve_args(parser.parse_args(shlex.split(f"{BASE} {flags}")))


def test_megatron_is_the_default_and_changes_nothing(parser):
    args = parser.parse_args([])
    assert args.context_parallel_algo == "megatron"
    before = dict(vars(args))
    assert resolve_args(args) is None
    assert vars(args) == before


def test_auto_takes_the_tile_with_the_fewest_bytes_for_the_models_head_ratio(resolve):
    assert resolve().tile == TileShape(2, 2)
    assert resolve("--group-query-attention --num-query-groups 2").tile == TileShape(1, 4)
    assert resolve("--context-parallel-size 16 --seq-length 1024").tile == TileShape(4, 4)
    assert resolve("--context-parallel-size 16 --group-query-attention --num-query-groups 2").tile == TileShape(2, 8)
    # The ratio is that of one tensor-parallel rank: 8 heads and 2 groups on TP 8 are 1 and 1.
    tp = "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 2"
    assert resolve(tp).tile == TileShape(2, 2)


def test_flags_reach_the_settings(resolve):
    mesh = resolve(
        "--mesh-tile-shape 4x1 --mesh-tile-shape-backward 2x2 --mesh-exchange shift --mesh-kernel reference "
        "--mesh-log-comm --bf16"
    )
    assert (str(mesh.tile), str(mesh.tile_backward)) == ("4x1", "2x2")
    assert (mesh.exchange, mesh.kernel, mesh.log_comm) == ("shift", "reference", True)
    assert mesh.shape.item_bytes == 2
    assert resolve("--mesh-tile-shape-backward auto").tile_backward.size == 4


def test_a_cluster_decides_tile_exchange_and_order_by_time(resolve):
    flags = "--context-parallel-size 16 --seq-length 65536 --bf16 --num-attention-heads 32 --hidden-size 4096"
    mesh = resolve(f"{flags} --mesh-cluster h800-hdr-1nic --mesh-tile-shape-backward auto")
    cluster = load_cluster("h800-hdr-1nic")
    for direction, tile in ((Direction.FORWARD, mesh.tile), (Direction.BACKWARD, mesh.tile_backward)):
        ranked = rank_candidates(16, mesh.shape, direction, cluster)
        assert (ranked[0].tile, ranked[0].exchange) == (tile, mesh.exchange_of(direction))
        assert dict(mesh.costs)[direction] == ranked[0].costs
    assert "least predicted time on h800-hdr-1nic" in mesh.why
    assert "fewest bytes; no cluster is known" in resolve(flags).why


def test_a_cluster_file_is_read_and_the_exchange_can_be_forced(resolve, tmp_path):
    file = tmp_path / "mine.yaml"
    known = Path(cluster_module.__file__).resolve().parents[1] / "configs" / "clusters" / "h100-ndr.yaml"
    file.write_text(known.read_text().replace("h100-ndr", "mine"))
    mesh = resolve(f"--mesh-cluster {file} --mesh-exchange shift --mesh-tile-shape 2x2t")
    assert (mesh.exchange_of(Direction.FORWARD), mesh.exchange_of(Direction.BACKWARD)) == ("shift", "shift")
    assert mesh.tile == TileShape(2, 2, transposed=True)
    assert mesh.tile.levels == (2, 2)


def test_an_automatic_tile_respects_the_memory_limit(resolve):
    wide = resolve("--context-parallel-size 16 --seq-length 1024")
    need = wide.peak_bytes()
    tight = resolve(f"--context-parallel-size 16 --seq-length 1024 --mesh-memory-limit {need - 1}B")
    assert tight.tile != wide.tile
    assert tight.peak_bytes() < need


def test_the_alias_of_the_algorithm_is_accepted(parser):
    args = parser.parse_args(shlex.split(BASE.replace("algo mesh", "algo mesh_cp_algo")))
    assert resolve_args(args).tile == TileShape(2, 2)


def test_a_parser_that_has_the_flag_already_gets_mesh_as_one_more_choice():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context-parallel-algo", choices=["ulysses_cp_algo", "megatron_cp_algo"])
    add_args(parser)
    assert parser.parse_args(["--context-parallel-algo", "mesh"]).context_parallel_algo == "mesh"
    assert parser.parse_args(["--context-parallel-algo", "ulysses_cp_algo"]).context_parallel_algo == "ulysses_cp_algo"


BAD_VALUES = {
    "--context-parallel-algo Mesh": "unknown algorithm 'Mesh': choose from megatron, mesh; did you mean mesh?",
    "--context-parallel-algo meshh": "unknown algorithm 'meshh': choose from megatron, mesh; did you mean mesh?",
    "--mesh-tile-shape 2": "'2' is no tile: give auto, or AxB",
    "--mesh-tile-shape 2*2": "'2*2' is no tile",
    "--mesh-tile-shape 0x4": "'0x4' is no tile",
    "--mesh-tile-shape same": "'same' is no tile",
    "--mesh-tile-shape-backward two": "give same or auto, or AxB",
    "--mesh-exchange ring": "unknown exchange 'ring': choose from auto, direct, shift",
    "--mesh-kernel sdpaa": "did you mean sdpa?",
    "--mesh-memory-limit 8": "'8' must be a positive size with its unit, such as 20GB",
    "--mesh-memory-limit 0GB": "must be a positive size",
}


@pytest.mark.parametrize(("flags", "message"), BAD_VALUES.items(), ids=BAD_VALUES)
def test_rejects_a_bad_value_at_parse_time_with_the_choices(parser, capsys, flags, message):
    """The help text of --cp-comm-type says `allgather`, Transformer Engine refuses it at the first forward."""
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())
    assert message in capsys.readouterr().err


REFUSED = {
    "cluster": ("--mesh-cluster h100-ndx", "--mesh-cluster h100-ndx: unknown cluster; did you mean h100-ndr"),
    "cluster file": ("--mesh-cluster no/such.yaml", "--mesh-cluster no/such.yaml: cannot read the file"),
    "tp on a cluster": (
        "--mesh-cluster h100-ndr --tensor-model-parallel-size 16 --num-attention-heads 16 --hidden-size 128",
        "--tensor-model-parallel-size 16 with 8 GPUs a node",
    ),
    "memory limit": ("--mesh-memory-limit 1KB", "--mesh-memory-limit 1000: .*the smallest need is [0-9]+ bytes"),
    "tile of another size": ("--mesh-tile-shape 8x2", r"context_parallel_size 4 with --mesh-tile-shape 8x2 = 16.*try"),
    "backward tile": ("--mesh-tile-shape-backward 3x1", "--mesh-tile-shape-backward 3x1 = 3"),
    "sequence length": ("--seq-length 100", "--seq-length 100 with context_parallel_size 4.*= 8; try 96 or 104"),
    "dropout": ("--attention-dropout 0.1", "--attention-dropout 0.1.*pass --attention-dropout 0"),
    "window": ("--window-size 127,0", r"--window-size \(127, 0\).*sliding-window"),
    "window layers": ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2.*sliding-window"),
    "softmax offset": ("--softmax-type off-by-one", "--softmax-type off-by-one.*use vanilla"),
    "sink": ("--softmax-type learnable", "--softmax-type learnable.*use vanilla"),
    "reset mask": ("--reset-attention-mask", "--reset-attention-mask True.*packed"),
    "documents": ("--dataloader-inter-document-masking", "--dataloader-inter-document-masking True.*packed"),
    "sft": ("--sft", "--sft True.*packed"),
    "hybrid cp": ("--hybrid-context-parallel", "--hybrid-context-parallel True"),
    "dsa": ("--experimental-attention-variant dsa", "--experimental-attention-variant dsa"),
    "hybrid model": (
        "--hybrid-layer-pattern M*",
        "--hybrid-layer-pattern M.*use --transformer-impl transformer_engine",
    ),
    "mla": ("--multi-latent-attention", "--multi-latent-attention True"),
    "spec": ("--spec module name", "--spec .*module.*leave the flag out"),
    "qk clip": ("--qk-clip", "--qk-clip True"),
    "max logit": ("--log-max-attention-logit", "--log-max-attention-logit True"),
    "cuda graphs": ("--cuda-graph-impl local", "--cuda-graph-impl local"),
    "cuda graphs, old flag": ("--enable-cuda-graph", "--enable-cuda-graph True"),
    "flash attention flag": ("--use-flash-attn", "--use-flash-attn True.*--mesh-kernel"),
    "eod mask": ("--eod-mask-loss", "--eod-mask-loss .*add --calculate-per-token-loss"),
    "cp comm type": ("--cp-comm-type a2a", "--cp-comm-type a2a.*leave --cp-comm-type out"),
    "hierarchical comm type": (
        "--transformer-impl transformer_engine --cp-comm-type a2a+p2p mesh",
        r"a2a\+p2p cannot stand beside mesh",
    ),
    "attention backend": ("--attention-backend flash", "--attention-backend flash.*use --mesh-kernel"),
    "inference impl": ("--transformer-impl inference_optimized", "--transformer-impl inference_optimized"),
    "query heads": (
        "--group-query-attention --num-query-groups 3",
        "--num-attention-heads 8 with --num-query-groups 3",
    ),
    "tensor parallel": (
        "--tensor-model-parallel-size 3",
        "--num-attention-heads 8 with --tensor-model-parallel-size 3",
    ),
    "hierarchical sizes": ("--hierarchical-context-parallel-sizes 4 1", "--hierarchical-context-parallel-sizes 4 1"),
    "te": ("--mesh-kernel te", "--mesh-kernel te: it runs on CUDA tensors, got cpu"),
    "flash": ("--mesh-kernel flash", "--mesh-kernel flash: it runs on CUDA tensors, got cpu"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_rejects_what_mesh_cannot_do_naming_the_flag_and_a_way_out(resolve, flags, message):
    """MLM PR #1160, TE #2541, TE #961, MLM #2797, #4878: never another mask, algorithm or kernel than was asked for."""
    if flags.split()[0] == "--dataloader-inter-document-masking" and megatron_version() < Version("0.19"):
        pytest.skip("a flag of megatron-core 0.19 and newer")
    with pytest.raises(ValueError, match=message):
        resolve(flags)


def test_rejects_a_dense_mask_from_the_data_loader(parser):
    """MLM #1025, NeMo #14526: a dense s x s mask at 128k."""
    flags = BASE.replace("--no-create-attention-mask-in-dataloader", "")
    with pytest.raises(ValueError, match="128 x 128 attention mask.*pass --no-create-attention-mask-in-dataloader"):
        resolve_args(parser.parse_args(shlex.split(flags)))


def test_every_refused_name_is_an_argument_of_megatron(parser):
    """A flag renamed upstream would otherwise be let through."""
    if megatron_version() < Version("0.19"):
        pytest.skip("an older Megatron lacks some of the names")
    from megatron_mesh_cp.megatron.args import _REFUSED, _REFUSED_LOCALLY

    older = {"hybrid_override_pattern"}  # up to 0.17; stock scripts of those are supported
    assert not {*_REFUSED, *_REFUSED_LOCALLY} - older - {action.dest for action in parser._actions}


def test_layer_specs_of_ones_own_and_hybrid_models_are_fine_with_transformer_engines_attention(resolve):
    """Their attention is TEDotProductAttention, which knows mesh wherever it stands (tests/te)."""
    if megatron_version() < Version("0.18"):
        pytest.skip("an older Megatron calls the pattern otherwise")
    assert resolve("--transformer-impl transformer_engine --hybrid-layer-pattern M*-M*- --spec module name").size == 4


COMM_TYPES = {
    "": ("mesh",),
    "--cp-comm-type mesh": ("mesh",),
    "--cp-comm-type mesh mesh": ("mesh", "mesh"),
    "--transformer-impl transformer_engine --cp-comm-type p2p mesh": ("p2p", "mesh"),
    "--transformer-impl transformer_engine --cp-comm-type mesh a2a": ("mesh", "a2a"),
}


@pytest.mark.parametrize(("flags", "types"), COMM_TYPES.items(), ids=COMM_TYPES)
def test_cp_comm_type_names_the_layers_of_mesh(resolve, flags, types):
    assert resolve(flags).comm_types == types


def test_cp_comm_type_mesh_turns_mesh_on_by_itself(parser):
    base = BASE.replace("--context-parallel-algo mesh", "")
    assert "context-parallel-algo" not in base
    assert resolve_args(parser.parse_args(shlex.split(base))) is None
    assert resolve_args(parser.parse_args(shlex.split(f"{base} --cp-comm-type mesh"))).comm_types == ("mesh",)


BAD_COMM_TYPES = {
    "another number of layers": ("p2p mesh mesh", "names 3 layers, --num-layers is 2"),
    "hierarchical": ("a2a+p2p mesh", r"a2a\+p2p cannot stand beside mesh, hierarchical sizes are the tile"),
    "unknown": ("allgather mesh", "allgather cannot stand beside mesh, it is unknown; use p2p, all_gather or a2a"),
}


@pytest.mark.parametrize(("types", "message"), BAD_COMM_TYPES.values(), ids=BAD_COMM_TYPES)
def test_rejects_comm_types_that_cannot_stand_beside_mesh(resolve, types, message):
    with pytest.raises(ValueError, match=message):
        resolve(f"--transformer-impl transformer_engine --cp-comm-type {types}")


def test_rejects_other_comm_types_with_megatrons_own_attention(resolve):
    with pytest.raises(ValueError, match="p2p mesh with --transformer-impl local.*use --cp-comm-type mesh or"):
        resolve("--cp-comm-type p2p mesh")


MISSING = {
    "--seq-length 128": "--seq-length is missing",
    "--micro-batch-size 1": "--micro-batch-size is missing",
    "--hidden-size 64": "--hidden-size is missing",
}


@pytest.mark.parametrize(("flag", "message"), MISSING.items(), ids=MISSING)
def test_a_missing_size_is_named(parser, flag, message):
    with pytest.raises(ValueError, match=message):
        resolve_args(parser.parse_args(shlex.split(BASE.replace(flag, ""))))


@pytest.mark.parametrize("flag", ["--context-parallel-size", "--tensor-model-parallel-size"])
def test_a_size_of_0_is_refused(resolve, flag):
    with pytest.raises(ValueError, match=f"{flag} 0: it must be at least 1"):
        resolve(f"{flag} 0")


def test_arguments_without_the_flags_and_flags_added_twice(parser):
    with pytest.raises(ValueError, match="pass megatron_mesh_cp.add_args"):
        resolve_args(argparse.Namespace(context_parallel_algo="mesh"))
    assert add_args(parser) is parser


def test_the_megatron_that_an_import_finds_is_the_one_that_is_checked(tmp_path):
    import os
    import subprocess
    import sys

    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("__version__ = '0.25.2'\n")
    (tmp_path / "megatron" / "__init__.py").write_text("")
    code = "from megatron_mesh_cp.megatron.versions import check_megatron; check_megatron()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "megatron-core 0.25.2 is not supported" in done.stderr


MEANINGLESS = ["--mesh-tile-shape 2x2", "--mesh-exchange shift", "--mesh-kernel sdpa", "--mesh-log-comm"]


@pytest.mark.parametrize("flags", MEANINGLESS)
def test_rejects_a_mesh_flag_that_would_silently_do_nothing(parser, flags):
    args = parser.parse_args(flags.split())
    with pytest.raises(ValueError, match=f"{flags.split()[0]} .*has no effect with --context-parallel-algo megatron"):
        resolve_args(args)


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0", "0.20.0rc1"])
def test_rejects_a_megatron_outside_the_supported_range(version):
    with pytest.raises(ValueError, match=f"megatron-core {re.escape(version)} is not supported.*0.16.*0.20"):
        check_megatron(Version(version))


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.19.2", "0.19.0rc5"])
def test_allows_the_supported_megatrons(version):
    assert check_megatron(Version(version)) == Version(version)
