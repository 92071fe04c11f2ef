"""Cluster files: those that ship load and are believable; a mistake in one is one line that names the field."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_mesh_cp import cluster as cluster_module
from megatron_mesh_cp.cluster import Cluster, KernelRates, Link, cluster_names, load_cluster, parse_cluster
from megatron_mesh_cp.cost import AttentionShape
from megatron_mesh_cp.layout import BlockKind
from megatron_mesh_cp.plan import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
RATES = ("forward_full", "forward_causal", "backward_full", "backward_causal")
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "clusters"

TEXT = """
name: toy
device: Toy 1
description: two lengths, round figures
gpus_per_node: 8
nics_per_node: 4
memory_gb: 80
peak_tflops: 1000
links:
  intra: {bandwidth_gb_s: 400, latency_us: 3, source: here}
  inter: {bandwidth_gb_s: 25, latency_us: 4.5, source: here}
kernel:
  head_dim: 128
  lengths: [1024, 4096]
  forward_full: [400, 600]
  forward_causal: [300, 500]
  backward_full: [200, 300]
  backward_causal: [150, 250]
  source: here
"""


def toy(**changes: object) -> str:
    """TEXT with fields changed: `links__inter__latency_us=5`; None takes a field away."""
    value = yaml.safe_load(TEXT)
    for name, new in changes.items():
        *sections, field = name.split("__")
        at = value
        for section in sections:
            at = at[section]
        if new is None:
            del at[field]
        else:
            at[field] = new
    return yaml.safe_dump(value)


@pytest.fixture
def cluster() -> Cluster:
    return parse_cluster(TEXT)


def test_units_are_bytes_seconds_and_flops(cluster):
    assert (cluster.name, cluster.device) == ("toy", "Toy 1")
    assert (cluster.gpus_per_node, cluster.nics_per_node) == (8, 4)
    assert (cluster.memory, cluster.peak_flops) == (80_000_000_000, 1e15)
    assert (cluster.intra.bandwidth, cluster.inter.bandwidth) == (400e9, 25e9)
    assert (cluster.intra.latency, cluster.inter.latency) == pytest.approx((3e-6, 4.5e-6))
    assert cluster.kernel.lengths == (1024, 4096)
    assert cluster.kernel.backward_causal == (150e12, 250e12)


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_loads_and_is_believable(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.inter.bandwidth <= cluster.intra.bandwidth
    assert 1e-6 <= cluster.intra.latency <= cluster.inter.latency < 0.01
    assert cluster.memory >= 1e9
    kernel = cluster.kernel
    share_of_peak, most = ((0.001, 0.5), 1.5) if name == "cpu-gloo" else ((0.3, 0.8), 1.0)  # CPU figures are rough
    for field in RATES:
        assert share_of_peak[0] < max(getattr(kernel, field)) / cluster.peak_flops < share_of_peak[1]
    for kind in ("full", "causal"):
        forward, backward = getattr(kernel, f"forward_{kind}"), getattr(kernel, f"backward_{kind}")
        assert all(b < most * f for f, b in zip(forward, backward, strict=True))


def test_the_clusters_of_the_design_ship():
    wanted = {"h100-ndr", "h800-hdr", "h800-hdr-1nic", "a100-hdr", "h200-ndr", "gb200-nvl72", "cpu-gloo"}
    assert wanted <= set(cluster_names())
    assert load_cluster("gb200-nvl72").gpus_per_node == 64
    assert load_cluster("h800-hdr").nics_per_node < load_cluster("h800-hdr").gpus_per_node


@pytest.mark.parametrize("name", sorted(set(cluster_names()) - {"cpu-gloo"}))
def test_every_figure_of_a_shipped_cluster_has_a_public_source(name):
    value = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for source in (value["links"]["intra"]["source"], value["links"]["inter"]["source"], value["kernel"]["source"]):
        assert "arXiv 2" in source
    assert "NVIDIA" in value["description"]


def test_h100_rates_are_those_of_flashattention_3():
    kernel = load_cluster("h100-ndr").kernel
    assert kernel.rate(FORWARD, False, 512) == 467e12
    assert kernel.rate(FORWARD, True, 16384) == 616e12
    assert kernel.rate(BACKWARD, False, 4096) == 542e12
    assert kernel.rate(BACKWARD, True, 4096) == pytest.approx(542e12 * 579 / 638, rel=0.002)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("causal", [False, True])
def test_rates_go_through_the_table_and_linearly_in_the_logarithm_between(cluster, direction, causal):
    low, high = {
        (FORWARD, False): (400e12, 600e12),
        (FORWARD, True): (300e12, 500e12),
        (BACKWARD, False): (200e12, 300e12),
        (BACKWARD, True): (150e12, 250e12),
    }[direction, causal]
    rate = cluster.kernel.rate
    assert rate(direction, causal, 1024) == low
    assert rate(direction, causal, 4096) == high
    assert rate(direction, causal, 2048) == pytest.approx((low + high) / 2)
    quarter = round(1024 * 4**0.25)
    assert rate(direction, causal, quarter) == pytest.approx(low + (high - low) / 4, rel=1e-3)
    assert rate(direction, causal, 1 << 20) == high
    assert rate(direction, causal, 512) == pytest.approx(low / 2)
    assert rate(direction, causal, 1) == pytest.approx(low / 1024)


def test_rates_never_pass_the_peak_and_never_jump(cluster):
    lengths = [int(1.05**k) for k in range(1, 320)]
    for direction in Direction:
        for causal in (False, True):
            rates = [cluster.kernel.rate(direction, causal, length) for length in lengths]
            assert max(rates) <= cluster.peak_flops
            assert rates == sorted(rates)


def test_one_length_is_a_table_too():
    kernel = KernelRates((1024,), *[(100.0,)] * 4)
    assert [kernel.rate(FORWARD, True, length) for length in (512, 1024, 2048)] == [50.0, 100.0, 100.0]
    with pytest.raises(ValueError, match="length must be a positive number, got 0"):
        kernel.rate(FORWARD, True, 0)


SHAPE = AttentionShape(seq_local=4096, batch=2, heads=8, kv_heads=2, head_dim=128)


def test_block_seconds_are_flops_of_the_live_area_over_the_rate(cluster):
    full = 4 * 4096**2 * 8 * 128 * 2
    seconds = cluster.block_seconds
    assert seconds(SHAPE, BlockKind.FULL, FORWARD) == pytest.approx(full / 600e12)
    assert seconds(SHAPE, BlockKind.FULL, BACKWARD) == pytest.approx(2.5 * full / 300e12)
    assert seconds(SHAPE, BlockKind.CAUSAL, FORWARD) == pytest.approx(full / 2 / 500e12)
    assert seconds(SHAPE, BlockKind.CAUSAL, BACKWARD) == pytest.approx(2.5 * full / 2 / 250e12)
    for half in (BlockKind.Q_SECOND_HALF, BlockKind.KV_FIRST_HALF):  # the unmasked rate at 2048 tokens
        assert seconds(SHAPE, half, FORWARD) == pytest.approx(full / 2 / 500e12)
        assert seconds(SHAPE, half, BACKWARD) == pytest.approx(2.5 * full / 2 / 250e12)
    assert seconds(SHAPE, BlockKind.EMPTY, FORWARD) == 0.0


def test_block_seconds_of_another_v_head_dim_and_of_one_token(cluster):
    wide = replace(SHAPE, v_head_dim=64)
    whole, part = (cluster.block_seconds(s, BlockKind.FULL, FORWARD) for s in (SHAPE, wide))
    assert part == pytest.approx(whole * (128 + 64) / 256)
    one = replace(SHAPE, seq_local=1)
    for kind in set(BlockKind) - {BlockKind.EMPTY}:
        assert math.isfinite(cluster.block_seconds(one, kind, BACKWARD))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node must be a positive whole number, got 0"),
        ({"gpus_per_node": 7.5}, "gpus_per_node must be a positive whole number, got 7.5"),
        ({"nics_per_node": True}, "nics_per_node must be a positive whole number, got True"),
        ({"nics_per_node": 9}, "nics_per_node 9 with gpus_per_node 8: a GPU uses one NIC"),
        (
            {"nics_per_node": 3},
            "nics_per_node 3 with gpus_per_node 8: as many GPUs must share each NIC; it could be 1",
        ),
        (
            {"links__intra__latency_us": "1e-300"},
            "links.intra.latency_us must be zero or a positive number, got '1e-300', a text to YAML; write 1.0e-300",
        ),
        ({"peak_tflops": "1.5e3"}, "peak_tflops must be a positive number, got '1.5e3', a text to YAML; write 1.5e+3"),
        ({"memory_gb": -80}, "memory_gb must be a positive number, got -80"),
        ({"peak_tflops": "fast"}, "peak_tflops must be a positive number, got 'fast'"),
        ({"peak_tflops": 599}, "kernel.forward_full at 4096 tokens is 600 TFLOP/s, above peak_tflops 599 of Toy 1"),
        ({"kernel__backward_causal": [150, 2e6]}, "kernel.backward_causal at 4096 tokens is 2e+06 TFLOP/s, above"),
        ({"links__inter__bandwidth_gb_s": 0}, "links.inter.bandwidth_gb_s must be a positive number, got 0"),
        ({"links__intra__bandwidth_gb_s": math.inf}, "links.intra.bandwidth_gb_s must be a positive number, got inf"),
        ({"links__intra__latency_us": -1}, "links.intra.latency_us must be zero or a positive number, got -1"),
        ({"links__intra__latency_us": math.nan}, "links.intra.latency_us must be zero or a positive number, got nan"),
        ({"links__inter__source": ""}, "links.inter.source must be a text, got ''"),
        ({"name": 100}, "name must be a text, got 100"),
        ({"description": ["no"]}, "description must be a text"),
        ({"memory_gb": None}, "missing field memory_gb"),
        ({"memory_gb": None, "name": None}, "missing fields name, memory_gb"),
        ({"links__inter": None}, "missing field links.inter"),
        ({"kernel__source": None}, "missing field kernel.source"),
        ({"nic_per_node": 4}, "unknown field nic_per_node; did you mean nics_per_node? the fields are name, "),
        ({"links__inter__latency_ms": 4}, "unknown field links.inter.latency_ms; did you mean latency_us?"),
        ({"kernel__forward": 4}, "unknown field kernel.forward; did you mean forward_full?"),
        ({"kernel__zzz": 4}, "unknown field kernel.zzz; the fields are head_dim, lengths,"),
        ({"links": 4}, "links must be a mapping of `key: value` lines, got 4"),
        ({"links__inter": [4]}, "links.inter must be a mapping of `key: value` lines, got [4]"),
        ({"kernel__lengths": 1024}, "kernel.lengths must be a list such as [512, 1024], got 1024"),
        ({"kernel__lengths": [1024, "4k"]}, "kernel.lengths must be a positive whole number, got '4k'"),
        ({"kernel__lengths": [4096, 1024]}, "kernel.lengths must be one or more tokens, ascending, got [4096, 1024]"),
        ({"kernel__lengths": [1024, 1024]}, "kernel.lengths must be one or more tokens, ascending, got [1024, 1024]"),
        ({"kernel__lengths": []}, "kernel.lengths must be one or more tokens, ascending, got []"),
        ({"kernel__forward_causal": [300]}, "kernel.forward_causal has 1 rates for 2 lengths; give one for each"),
        ({"kernel__forward_full": [400, 0]}, "kernel.forward_full must be a positive number, got 0"),
        ({"kernel__head_dim": 0}, "kernel.head_dim must be a positive whole number, got 0"),
    ],
)
def test_rejects_a_wrong_file_in_one_line_that_names_the_field(changes, says, tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(toy(**changes))
    with pytest.raises(ValueError) as caught:
        load_cluster(str(path), "--mesh-cluster")
    message = str(caught.value)
    assert message.startswith(f"--mesh-cluster {path}: {says}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"# nothing yet\n", "the file is empty"),
        (b"- h100\n", "a cluster file must be a mapping of `key: value` lines, got ['h100']"),
        (b"name: [\n", "not valid YAML"),
        (b"name: a\n\nname: b\n", "name is given twice"),
        (b"name: \xff\n", "not a text file in UTF-8"),
        (b"[]: 1\n", "line 1: not valid YAML: found unhashable key"),
        (b"name: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_rejects_what_is_no_cluster_file(content, says, tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_cluster(str(path))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--cluster {path}: ")
    assert "\n" not in str(caught.value)


def test_rejects_an_unknown_name_with_the_nearest_and_all_of_them():
    with pytest.raises(ValueError, match=r"^--cluster h100: unknown cluster; did you mean h100-ndr\? known are a100-"):
        load_cluster("h100")
    with pytest.raises(ValueError, match=r"^--mesh-cluster zzz: unknown cluster; known are a100-hdr, .*YAML FILE$"):
        load_cluster("zzz", "--mesh-cluster")
    with pytest.raises(ValueError, match=r"^--cluster auto: plan, tune, compare and bench must .*h100-ndr.* YAML FILE"):
        load_cluster("auto")


def test_rejects_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"no\.yaml: cannot read the file: No such file"):
        load_cluster(str(tmp_path / "no.yaml"))
    with pytest.raises(ValueError, match=r"cannot read the file: Is a directory"):
        load_cluster(str(tmp_path))


def test_a_file_in_this_folder_needs_no_suffix_and_a_known_name_wins(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text(TEXT)
    (tmp_path / "h100-ndr").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert load_cluster("mine").name == "toy"
    assert load_cluster("h100-ndr").name == "h100-ndr"


def test_without_configs_a_name_is_refused_and_a_file_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "_DIRECTORY", tmp_path / "gone")
    assert cluster_names() == ()
    with pytest.raises(
        ValueError, match=r"^--cluster h100-ndr: the project's configs/clusters is not in .*give the pa"
    ):
        load_cluster("h100-ndr")
    (tmp_path / "toy.yaml").write_text(TEXT)
    assert load_cluster(str(tmp_path / "toy.yaml")).name == "toy"


def test_checks_hold_for_clusters_made_in_python(cluster):
    for field in ("gpus_per_node", "nics_per_node", "peak_flops", "memory"):
        with pytest.raises(ValueError, match=f"{field} must be a positive number, got 0"):
            replace(cluster, **{field: 0})
    with pytest.raises(ValueError, match="bandwidth must be a positive number, got -1"):
        Link(-1, 0.0)
    with pytest.raises(ValueError, match="forward_full must be a positive number, got 0"):
        replace(cluster.kernel, forward_full=(0, 1))
    assert Link(1.0, 0.0).latency == 0  # a link may be ideal


def test_importing_it_imports_no_torch():
    code = "import sys, megatron_mesh_cp.cluster; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
