"""CPU ranks: "cuda" means "cpu" for Megatron; its unmodified `pretrain()` runs, resumes and fails well."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from argparse import Namespace

import pytest
import torch
from launch import run_pretrain

from megatron_mesh_cp.megatron import cpu, pretrain

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 8 --log-interval 1
    --eval-interval 4 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 257
    --split 98,1,1 --num-workers 0 --transformer-impl local --distributed-backend gloo --no-rope-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader
""")
MOE = shlex.split("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall")


# ---- the patches -------------------------------------------------------------------------------------------

PROBE = """
    import json, sys
    import torch
    from megatron_mesh_cp.megatron.cpu import enable_cpu_ranks

    before = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    answers = [enable_cpu_ranks(), enable_cpu_ranks(), enable_cpu_ranks(training=True)]
    import megatron.core.tensor_parallel.random as rng
    from megatron.core.jit import jit_fuser

    def doubled(x):
        return 2 * x

    weight = torch.nn.Parameter(torch.ones(2, device="cuda:0", pin_memory=True))
    rng.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
    draws = []
    for _ in range(2):
        with rng.get_cuda_rng_tracker().fork():
            draws.append(torch.rand(1, device="cuda").item())
    outside = torch.rand(1).item()
    torch.cuda.manual_seed(7)
    seeded = torch.rand(1).item()
    print(json.dumps({
        "imported": before,
        "answers": answers,
        "modes": torch._C._len_torch_function_stack(),
        "devices": [str(t.device) for t in (
            weight, weight.cuda(), weight.to("cuda"), weight.to(torch.device("cuda", 0)),
            torch.zeros(1, device=torch.cuda.current_device()), torch.nn.Linear(2, 2).cuda().weight,
            torch.arange(3, device=torch.device("cuda")))],
        "same": weight.cuda() is weight,
        "type": weight.type(),
        "plain": jit_fuser(doubled) is doubled and torch.compile is not jit_fuser,
        "draws": draws,
        "outside_is_seed_7": outside == seeded,
    }))
"""


@pytest.fixture(scope="module")
def probe() -> dict:
    """What a fresh process sees: the patches last as long as the process, so none may land in this one."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROBE)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_importing_the_module_does_not_import_megatron(probe):
    assert probe["imported"] == []


def test_enabling_again_changes_nothing_and_says_it_is_on(probe):
    assert probe["answers"] == [True, True, True]
    assert probe["modes"] == 1


def test_every_way_to_name_a_cuda_device_gives_a_cpu_tensor(probe):
    assert set(probe["devices"]) == {"cpu"}
    assert probe["same"], "cuda() of a CPU tensor must not copy: parameters keep their identity"
    assert probe["type"] == "torch.cuda.FloatTensor", "the type that Megatron's optimizers ask for"


def test_fused_functions_stay_plain_python(probe):
    assert probe["plain"]


def test_the_rng_tracker_forks_and_restores_the_cpu_generator(probe):
    first, second = probe["draws"]
    assert first != second, "a fork continues where the last one ended"
    assert probe["outside_is_seed_7"], "outside of forks the generator is as seeded"


def test_nothing_is_touched_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_patch_core", lambda: pytest.fail("patched"))
    assert cpu.enable_cpu_ranks(training=True) is False


# ---- runs --------------------------------------------------------------------------------------------------


def test_pretraining_learns_and_evaluates(tmp_path):
    run = run_pretrain(FLAGS, ranks=1, timeout=120, cwd=tmp_path).check()
    assert [entry.iteration for entry in run.iterations] == list(range(1, 9))
    assert run.losses[-1] < run.losses[0] - 0.2
    assert 5 < run.validation["iteration 4"] < run.losses[0]


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    saving = [*FLAGS, "--save-interval", "4"]
    whole = run_pretrain([*saving, "--save", "whole"], ranks=2, timeout=120, cwd=tmp_path).check()
    run_pretrain([*saving, "--save", "cut", "--exit-interval", "4"], ranks=2, timeout=120, cwd=tmp_path).check()
    rest = run_pretrain([*saving, "--save", "cut", "--load", "cut"], ranks=2, timeout=120, cwd=tmp_path).check()
    assert [entry.iteration for entry in rest.iterations] == [5, 6, 7, 8]
    del rest.iterations[1], whole.iterations[4 + 1]  # the second line of a process tells two iterations' mean
    assert rest.losses == whole.losses[4:]
    assert rest.grad_norms == whole.grad_norms[4:]
    assert rest.validation["iteration 8"] == whole.validation["iteration 8"]
    # And a third run does not write into the second one's folder.
    third = run_pretrain([*FLAGS, "--save", "cut"], ranks=2, timeout=60, cwd=tmp_path)
    assert third.returncode == 1
    assert "holds a checkpoint of iteration 8" in third.stderr


def test_experts_on_two_ranks_learn_what_they_learn_on_one_stage_with_the_other_dispatcher(tmp_path):
    """The all-to-all dispatcher reads its split sizes off a GPU; here they are on the CPU from the start."""
    flags = [*FLAGS, *MOE, "--expert-model-parallel-size", "2", "--train-iters", "4"]
    alltoall = run_pretrain(flags, ranks=2, timeout=120, cwd=tmp_path).check()
    flags += ["--moe-token-dispatcher-type", "allgather"]
    assert alltoall.losses == pytest.approx(
        run_pretrain(flags, ranks=2, timeout=120, cwd=tmp_path).check().losses, abs=2e-6
    )


@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_a_failure_on_one_rank_ends_the_whole_run_at_once(tmp_path, launcher):
    (tmp_path / "broken.py").write_text(
        "import atexit, os, time\n"
        "def spec(config, vp_stage=None):\n"
        "    from megatron.training.models.gpt import default_layer_spec\n"
        "    if os.environ['RANK'] == '1':\n"
        "        atexit.register(time.sleep, 1000)  # stands for a tear-down that waits for peers\n"
        "        raise RuntimeError('broken on purpose')\n"
        "    return default_layer_spec(config, vp_stage)\n"
    )
    flags = [*FLAGS, "--spec", "broken", "spec"]
    run = run_pretrain(flags, ranks=2, timeout=100, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, launcher=launcher)
    assert run.returncode == 1
    assert not run.timed_out, "it hung"
    assert "RuntimeError: broken on purpose" in run.stderr


def test_a_run_that_takes_too_long_is_killed(tmp_path):
    run = run_pretrain([*FLAGS, "--train-iters", "100000"], ranks=2, timeout=6, cwd=tmp_path)
    assert run.timed_out
    assert run.returncode != 0
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _folder_of(pid) == str(tmp_path)]


def _folder_of(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # somebody else's process, or one that has just ended
        return None


@pytest.mark.parametrize(("attribute", "flag", "what"), pretrain._UNSUPPORTED)
def test_rejects_what_the_entry_cannot_do_by_the_name_of_its_flag(attribute, flag, what):
    with pytest.raises(ValueError, match=f"^{flag} "):
        pretrain.refuse_unsupported(Namespace(**{attribute: "given"}))
    pretrain.refuse_unsupported(Namespace(**{attribute: None}))


def test_every_rejected_flag_is_one_that_megatron_has(tmp_path):
    """A flag that was renamed upstream would pass unnoticed. (A usage error lists all flags.)"""
    run = run_pretrain(["--no-such-flag"], ranks=1, timeout=60, cwd=tmp_path)
    assert run.returncode == 2
    listed = set(re.findall(r"--[a-z][a-z0-9-]*", run.stderr))
    assert {flag for _, flag, _ in pretrain._UNSUPPORTED} <= listed
