"""One cluster of four nodes for all tests here, a data set, a recipe, and the run that all are compared with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster

HOME = Path(__file__).resolve().parents[2]
ITERATIONS = 24
# As configs/quickstart.yaml, and as small as four nodes on two cores ask for.
RECIPE = f"""
MODEL_ARGS:
  --context-parallel-size: 4
  --context-parallel-algo: mesh
  --mesh-tile-shape: 2x2
  --num-layers: 2
  --hidden-size: 32
  --num-attention-heads: 4
  --seq-length: 64
  --max-position-embeddings: 64
  --position-embedding-type: rope
  --attention-dropout: 0
  --hidden-dropout: 0
  --tokenizer-type: NullTokenizer
  --vocab-size: 257
  --data-path: ['${{TEST_DATA}}']
  --split: 100,0,0
  --no-create-attention-mask-in-dataloader: true
  --num-workers: 0
  --micro-batch-size: 1
  --global-batch-size: 1
  --train-iters: {ITERATIONS}
  --lr: 1e-3
  --log-interval: 1
  --eval-interval: 1000
  --eval-iters: 0
  --save: ${{RUN_DIR}}/checkpoints
  --save-interval: 8
  --transformer-impl: local
  --distributed-backend: gloo
  --use-cpu-initialization: true
  --no-rope-fusion: true
  --no-persist-layer-norm: true
  --no-gradient-accumulation-fusion: true
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600), append=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mcs-", dir="/tmp") as folder, SlurmCluster(Path(folder)) as up:
        yield up


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """RECIPE, the path, and the variables that a job takes from the environment."""
    from megatron_mesh_cp.megatron.text_data import build_text_dataset

    folder = tmp_path_factory.mktemp("inputs")
    build_text_dataset(folder / "text", max_bytes=100_000, progress=False)
    (folder / "recipe.yaml").write_text(RECIPE)
    return {"RECIPE": str(folder / "recipe.yaml"), "TEST_DATA": str(folder / "text"), "MESH_CP_VENV": sys.prefix}


@pytest.fixture(scope="session")
def reference(inputs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """What `mesh-cp pretrain` prints on one machine, never interrupted: iteration, loss, gradient norm."""
    folder = tmp_path_factory.mktemp("reference")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_mesh_cp.cli.main", "pretrain", inputs["RECIPE"]],
        env=os.environ | inputs | {"RUN_DIR": str(folder), "PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = printed(done.stdout)
    assert [line[0] for line in lines] == list(range(1, ITERATIONS + 1))
    return lines


def printed(text: str) -> list[tuple[int, float, float]]:
    """Iteration, loss and gradient norm of each line of the training log; one may follow another rank's on a line."""
    found = re.findall(r"\] iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+) \|.*?grad norm: (\S+) \|", text)
    return [(int(number), float(loss), float(norm)) for number, loss, norm in found]


class Starts:
    """What the nodes of a run have logged, start by start."""

    def __init__(self, run_dir: Path, nodes: int = 4):
        self.texts = {rank: self._read(run_dir / "logs" / f"node-{rank}.log") for rank in range(nodes)}

    @staticmethod
    def _read(log: Path) -> list[str]:
        text = log.read_text(errors="replace") if log.exists() else ""
        return re.split(r"^(?==== job )", text, flags=re.MULTILINE)[1:]

    @property
    def iterations(self) -> list[list[tuple[int, float, float]]]:
        """Of each start; the last rank prints them."""
        return [printed(text) for text in self.texts[max(self.texts)]]

    def reached(self, start: int) -> int:
        """The last iteration that a start has printed; 0 before."""
        lines = self.iterations[start] if len(self.iterations) > start else []
        return lines[-1][0] if lines else 0


@pytest.fixture
def starts() -> Callable[[Path], Starts]:
    return Starts
