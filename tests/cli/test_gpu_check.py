"""scripts/gpu_check.sh without a GPU: whole on the CPU, and each of its verdicts on made-up evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_mesh_cp.cli import gpu_check, gpu_check_kernels, gpu_check_ranks, gpu_check_streams
from megatron_mesh_cp.cli.gpu_check_dense import Case, Dense
from megatron_mesh_cp.cli.gpu_check_kernels import check_kernel, usable
from megatron_mesh_cp.cli.gpu_check_ranks import RankJob, check_overlap, check_ranks
from megatron_mesh_cp.cli.gpu_check_rows import ABSENT, FAIL, NOT_APPLICABLE, OK, Error, Row, Tally
from megatron_mesh_cp.cli.gpu_check_speed import peak_of, rate_row
from megatron_mesh_cp.cli.gpu_check_streams import Span, hidden_share, kernel_spans, overlap_row, sync_rows
from megatron_mesh_cp.kernels import reference
from megatron_mesh_cp.kernels.reference import ReferenceKernel

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"


@pytest.fixture
def one_thread():
    """Two threads that wait for each other by spinning take minutes where others use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def script(*flags: str, limit: float = 270) -> subprocess.CompletedProcess:
    command = [str(SCRIPT), "--python", sys.executable, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env={**os.environ, "COLUMNS": "120"})


def test_without_a_gpu_one_line_says_that_nothing_was_checked(capsys):
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "no CUDA GPU" in err
    assert "nothing was checked" in err


def test_the_script_passes_that_exit_code_on():
    done = script()
    assert done.returncode == 2, done.stderr
    assert "nothing was checked" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"), [(["--json", "out.txt"], "--json"), (["--time-limit", "0"], "--time-limit")]
)
def test_refuses_bad_input_before_anything_starts(capsys, flags, says):
    assert gpu_check.main([*flags, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


def test_the_whole_on_the_cpu_passes_and_says_what_it_left_out(tmp_path):
    path = tmp_path / "rows.json"
    done = script("--device", "cpu", "--quick", "--json", str(path), "--time-limit", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    rows = [Row(**row) for row in content["rows"]]
    assert content["failed"] == 0
    assert {row.result for row in rows} == {OK, ABSENT, NOT_APPLICABLE}
    found = {(row.kernel, row.check): row for row in rows}
    assert len(found) == len(rows)
    for kernel in ("te", "flash"):
        assert "runs on CUDA tensors" in found[kernel, "kernel"].figure
    for kernel in ("sdpa", "reference"):
        mine = {row.check: row for row in rows if row.kernel == kernel}
        for check in (*gpu_check_kernels._BLOCKS.values(), "two blocks merged"):
            assert mine[f"{check}, forward"].result == mine[f"{check}, backward"].result == OK
        for tile in ("1x2", "2x1", "1x4", "2x2", "4x1", "2x2, one link, two communicators"):
            assert mine[f"tile {tile} over gloo"].result == OK
            assert "bit-equal" in mine[f"tile {tile} over gloo"].figure
        rates = [row for check, row in mine.items() if check.startswith("rate")]
        assert len(rates) == 4
        assert all("TFLOP/s" in row.figure and "not applicable on CPU" in row.bound for row in rates)
        assert [r.result for c, r in mine.items() if c.startswith("host")] == [NOT_APPLICABLE] * 2
    for check in ("overlap over NCCL", "CUDA_DEVICE_MAX_CONNECTIONS", "host synchronisations, several ranks"):
        assert found["all", check].result == NOT_APPLICABLE
    assert "no check failed" in done.stdout
    assert "two blocks merged" in done.stdout


# Kernels with a fault.


def run_in_process(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> tuple[int, dict[str, Row]]:
    """The exit code and the rows of the reference kernel, with no ranks and no rates."""

    def here(work, job, *rest):
        return work(0, job) if work is check_kernel else []

    monkeypatch.setattr(gpu_check, "guarded", here)
    for part in ("rate_rows", "one_rank_rows"):
        monkeypatch.setattr(gpu_check_kernels, part, lambda *args: [])
    path = tmp_path / "rows.json"
    code = gpu_check.main(["--device", "cpu", "--quick", "--json", str(path)])
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    assert (FAIL in capsys.readouterr().out) == (code == 1)
    return code, {row.check: row for row in rows if row.kernel == "reference"}


def failed(rows: dict[str, Row]) -> set[str]:
    return {check for check, row in rows.items() if row.result == FAIL}


WAYS = ("forward", "backward")
FORWARDS = {f"{name}, forward" for name in (*gpu_check_kernels._BLOCKS.values(), "two blocks merged")}
BACKWARDS = {name.replace("forward", "backward") for name in FORWARDS}


def test_a_kernel_that_takes_its_own_lse_for_the_global_one_fails(monkeypatch, capsys, tmp_path):
    right = ReferenceKernel.backward

    def local(self, dout, q, k, v, out, lse, delta, causal, scale):
        return right(self, dout, q, k, v, out, self.forward(q, k, v, causal, scale)[1], delta, causal, scale)

    monkeypatch.setattr(ReferenceKernel, "backward", local)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert failed(rows) == BACKWARDS


def test_a_kernel_whose_mask_is_off_by_one_fails_where_there_is_a_mask(monkeypatch, capsys, tmp_path):
    right = reference._scores

    def shifted(q, k, causal, scale):
        scores = right(q, k, False, scale)
        live = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return scores.masked_fill(~live, float("-inf")) if causal else scores

    monkeypatch.setattr(reference, "_scores", shifted)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    wrong = failed(rows)
    assert wrong >= {f"{name}, {way}" for name in ("causal block", "two blocks merged") for way in WAYS}
    assert wrong & FORWARDS == {"causal block, forward", "two blocks merged, forward"}
    assert not wrong & {f"full block, {way}" for way in WAYS}


def test_a_kernel_that_computes_the_wrong_half_fails_there(monkeypatch, capsys, tmp_path):
    """As where strides are not looked at: other rows than those of the second half."""
    right = ReferenceKernel.forward

    def forward(self, q, k, v, causal, scale):
        return right(self, q.flip(2) if q.shape[2] < k.shape[2] else q, k, v, causal, scale)

    monkeypatch.setattr(ReferenceKernel, "forward", forward)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert "second half of Q, all of KV, forward" in failed(rows)
    assert "all of Q, first half of KV, forward" not in failed(rows)


def test_an_lse_to_base_2_fails(monkeypatch, capsys, tmp_path):
    right = ReferenceKernel.forward

    def forward(self, *args):
        out, lse = right(self, *args)
        return out, lse / torch.log(torch.tensor(2.0))

    monkeypatch.setattr(ReferenceKernel, "forward", forward)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert failed(rows) >= FORWARDS
    assert "lse off by" in rows["causal block, forward"].figure


def test_a_kernel_that_gives_nan_fails(monkeypatch, capsys, tmp_path):
    right = ReferenceKernel.backward

    def backward(self, *args):
        dq, dk, dv = right(self, *args)
        dk[0, 0, 0, 0] = float("nan")
        return dq, dk, dv

    monkeypatch.setattr(ReferenceKernel, "backward", backward)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert failed(rows) == BACKWARDS


def test_a_kernel_that_raises_is_one_failed_row(monkeypatch, capsys, tmp_path):
    def forward(self, *args):
        raise RuntimeError("no execution plan\nand more")

    monkeypatch.setattr(ReferenceKernel, "forward", forward)
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    assert code == 1
    assert rows["blocks"] == Row("blocks", "reference", FAIL, "RuntimeError: no execution plan")


def test_a_kernel_with_one_dtype_is_checked_in_it_and_the_other_is_listed(monkeypatch, capsys, tmp_path):
    def check(self, dtype, *rest):
        if dtype is torch.float16:
            raise ValueError("float16 is not supported on this GPU")

    monkeypatch.setattr(ReferenceKernel, "check", check)
    gpu_check_kernels.select_kernel.__globals__["_selected"].cache_clear()
    code, rows = run_in_process(monkeypatch, capsys, tmp_path)
    gpu_check_kernels.select_kernel.__globals__["_selected"].cache_clear()
    assert code == 0
    assert rows["kernel float16"].result == ABSENT
    assert "float16 is not supported" in rows["kernel float16"].figure
    assert rows["two blocks merged, backward"].result == OK
    assert usable(list(rows.values()))


def test_the_dense_attention_is_that_of_autograd_and_its_blocks_add_up():
    case = Case(12, 8, 4, 2, torch.float32, True)
    dense = Dense(case, torch.device("cpu"))
    q, k, v, dout = (case.heads_first(x).double() for x in case.inputs(torch.device("cpu")))
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for got, want in zip((dense.out, dense.dq, dense.dk, dense.dv), (out, *grads), strict=True):
        assert torch.allclose(got, want, atol=1e-12)
    rows, halves = list(range(4, 12)), (list(range(5)), list(range(5, 12)))
    first, second = (dense.gradients(rows, columns) for columns in halves)
    assert torch.allclose(first[0] + second[0], dense.dq[:, :, rows], atol=1e-12)
    lse = [dense.forward(rows, columns)[1] for columns in halves]
    assert torch.allclose(torch.logaddexp(*lse), dense.lse[:, :, rows], atol=1e-12)


def test_a_tally_keeps_the_worst_and_one_with_nothing_fails():
    tally = Tally()
    assert tally.row("c", "k").result == FAIL
    tally.add("dq", Error(0.01, 0.1), Error(0.01, 0.1), 0.008)
    tally.add("dk", Error(0.0149, 0.1), Error(0.01, 0.1), 0.008)
    tally.add("dv", Error(0.012, 0.1), Error(0.01, 0.1), 0.008)
    row = tally.row("c", "k")
    assert row.result == OK
    assert "1.49 x torch's" in row.figure
    assert "dk" in row.figure
    tally.add("dq", Error(0.01, 0.5), Error(0.01, 0.1), 0.008)
    assert tally.row("c", "k").result == FAIL
    without_torch = Tally()
    without_torch.add("dq", Error(0.033, 0.1), None, 0.008)
    assert without_torch.row("c", "k").result == FAIL
    assert without_torch.row("c", "k").bound == "4 eps"


# Rates.


def test_a_rate_above_the_peak_is_a_failure():
    assert rate_row("rate", "te", 600e9, 1e-3, 989e12, "").result == OK
    row = rate_row("rate", "te", 1.937e15, 1.0, 989e12, "")
    assert row.result == FAIL
    assert "195.9% of the peak" in row.figure
    assert row.bound == "at most 989 TFLOP/s"
    assert rate_row("rate", "te", 1e9, 0.0, None, "unknown peak").result == FAIL
    assert rate_row("rate", "te", 1e9, float("nan"), 989e12, "").result == FAIL


def test_without_a_known_peak_the_rate_is_shown_and_not_judged():
    row = rate_row("rate", "te", 1e15, 1.0, None, "unknown peak")
    assert (row.result, row.bound) == (NOT_APPLICABLE, "unknown peak")
    assert "1e+03 TFLOP/s" in row.figure


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H800", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_is_that_of_the_cluster_files(name, tflops):
    peak = peak_of(name)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12, rel=0.01))


# Host synchronisations and overlap.


def test_only_warnings_of_synchronizing_calls_are_counted():
    with gpu_check_streams.sync_warnings(torch.device("cpu")) as found:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
    assert len(found) == 2
    assert all("test_gpu_check.py:" in place for place in found)


@pytest.mark.parametrize("fault", ["none", "synchronizes", "waits"])
def test_a_host_that_synchronizes_or_waits_fails(monkeypatch, fault):
    """torch.cuda is faked: an event is done once `done` is."""
    done: list[bool] = []
    modes: list[str] = []

    def call() -> None:
        if fault == "synchronizes" and modes[-1:] == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        if fault == "waits":
            done.append(True)

    event = SimpleNamespace(record=done.clear, query=lambda: bool(done))
    for name, value in (
        ("set_sync_debug_mode", modes.append),
        ("synchronize", lambda: None),
        ("_sleep", lambda cycles: None),
        ("Event", lambda: event),
    ):
        monkeypatch.setattr(torch.cuda, name, value)

    def gather(said: list, mine: object) -> None:
        said[:] = [mine]

    alone = SimpleNamespace(get_world_size=lambda: 1, barrier=lambda: None, all_gather_object=gather)
    monkeypatch.setattr(gpu_check_streams, "dist", alone)
    monkeypatch.setattr(gpu_check_streams, "attention_call", lambda *args: call)
    counted, ahead = sync_rows("one rank", "te", SimpleNamespace(size=1), torch.device("cuda"))
    assert counted.result == (FAIL if fault == "synchronizes" else OK)
    assert counted.figure.startswith("3 in 3 calls" if fault == "synchronizes" else "0 in 3 calls")
    assert ahead.result == (FAIL if fault == "waits" else OK)
    assert modes == ["warn", "default"]


SEND, BLOCK = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "void flash_fwd_kernel<64>"


def test_the_hidden_share_is_of_nccls_time_and_counts_each_moment_once():
    spans = [
        Span(SEND, 0, 10),  # 6 of 10 hidden, though two blocks overlap there
        Span(BLOCK, 4, 9),
        Span("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 6, 12),
        Span(SEND, 20, 30),  # 2 of 10
        Span("fmha_cutlassF", 28, 50),
        Span("elementwise_kernel", 20, 28),  # hides nothing
    ]
    assert hidden_share(spans) == pytest.approx(0.4)
    assert hidden_share(reversed(spans)) == pytest.approx(0.4)


@pytest.mark.parametrize("spans", [[], [Span(SEND, 0, 1)], [Span(BLOCK, 0, 1)]])
def test_a_trace_without_transfers_or_blocks_shows_nothing(spans):
    with pytest.raises(ValueError, match="the trace has"):
        hidden_share(spans)


def chrome_trace(hidden: float) -> dict:
    """10 us of NCCL of which a share is under attention, with what else a profiler writes."""
    kernel = {"ph": "X", "cat": "kernel"}
    return {
        "traceEvents": [
            {**kernel, "name": SEND, "ts": 100.0, "dur": 10},
            {**kernel, "name": BLOCK, "ts": 100.0 + 10 * (1 - hidden), "dur": 50},
            {"ph": "X", "cat": "cpu_op", "name": "aten::flash_attention", "ts": 0, "dur": 1000},
            {"ph": "i", "name": "flash"},
        ]
    }


def test_only_gpu_kernels_of_a_trace_count_and_the_worst_rank_decides():
    assert hidden_share(kernel_spans(chrome_trace(0.3))) == pytest.approx(0.3)
    assert overlap_row("overlap", "te", [0.9, 0.51]).result == OK
    row = overlap_row("overlap", "te", [0.9, 0.49])
    assert (row.result, row.bound) == (FAIL, "at least 50%")
    assert "49%" in row.figure


# Ranks.


def faulty(fault: str) -> list[Row]:
    """`check_ranks` on one of two gloo ranks, with mesh attention wrong in some way."""
    calls = [0]
    right = gpu_check_ranks.mesh_attention

    def attention(q, *args, **kwargs):
        calls[0] += 1
        out = right(q, *args, **kwargs)
        if fault == "noise":
            one = torch.ones_like(out)
            one.view(-1)[0] += calls[0] / 128  # of one element, in its last bits: no error bound sees that
            return out * one
        return out * 1.05 if fault == "wrong" and calls[0] else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_check_ranks, "mesh_attention", attention)
        return check_ranks(torch.distributed.get_rank(), RankJob(2, "sdpa", "cpu", quick=True))


def test_wrong_and_unrepeatable_ranks_fail(ranks):
    for fault, says in (("wrong", "twice bit-equal"), ("noise", "NOT bit-equal")):
        rows = ranks(2).run(faulty, fault, timeout=60)[0]
        assert [row.result for row in rows] == [FAIL] * 2
        assert all(says in row.figure for row in rows)
    assert [row.result for row in ranks(2).run(faulty, "nothing", timeout=60)[0]] == [OK] * 2


def connections(set_to: str | None, asked: str | None, started: bool) -> Row:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(gpu_check_ranks.CONNECTIONS, raising=False)
        if set_to:
            patch.setenv(gpu_check_ranks.CONNECTIONS, set_to)
        job = RankJob(2, "sdpa", "cuda", connections=asked)
        return gpu_check_ranks._connections_row(job, started and torch.distributed.get_rank() == 1)


def test_the_number_of_connections_must_reach_every_rank_before_cuda_starts(ranks):
    for case, result in ((("1", "1", False), OK), ((None, "1", False), FAIL), (("1", "1", True), FAIL)):
        assert [row.result for row in ranks(2).run(connections, *case, timeout=60)] == [result] * 2


def profiled(hidden: tuple[float, ...]) -> list[Row]:
    """`check_overlap` on CPU ranks with a profiler that writes a made-up trace; a share of 2: an empty one."""
    share = hidden[torch.distributed.get_rank()]

    @contextmanager
    def profile(activities):
        trace = {"traceEvents": []} if share == 2 else chrome_trace(share)
        yield SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(json.dumps(trace)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_check_ranks, "profile", profile)
        patch.setattr(gpu_check_streams, "attention_call", lambda *args: lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        return check_overlap(torch.distributed.get_rank(), RankJob(len(hidden), "auto", "cpu"))


def test_overlap_is_judged_over_all_ranks(ranks):
    for hidden, result in (((0.9, 0.6), OK), ((0.9, 0.3), FAIL), ((0.9, 2), FAIL)):
        for (row,) in ranks(2).run(profiled, hidden, timeout=60):
            assert row.result == result
    assert "0 NCCL" in row.figure


def test_what_ranks_share_and_over_what_is_said():
    assert RankJob(4, "te", "cuda", nccl=True, gpus=4).over == "NCCL"
    assert RankJob(4, "te", "cuda", gpus=1).over == "gloo, 4 ranks share 1 GPU(s)"
    assert not RankJob(4, "te", "cuda").deterministic
    assert RankJob(4, "flash", "cuda").deterministic


def die(rank: int, job: object) -> None:
    os._exit(3)


def hang(rank: int, job: object) -> None:
    time.sleep(300)


@pytest.mark.parametrize(
    ("work", "limit", "says"), [(die, 100, "exit code 3"), (hang, 4, "did not end within --time-limit 4 s")]
)
def test_a_crash_or_a_hang_is_a_failed_row(work, limit, says):
    begin = time.monotonic()
    (row,) = gpu_check.guarded(work, None, 1, "all checks", "te", limit)
    assert time.monotonic() - begin < 60
    assert row.result == FAIL
    assert says in row.figure


@pytest.mark.parametrize(
    ("gpus", "ranks", "over"), [(1, 4, [False, False]), (2, 2, [True, False]), (8, 4, [True, True])]
)
def test_ranks_talk_over_nccl_where_there_are_gpus_enough(monkeypatch, gpus, ranks, over):
    jobs: list[tuple] = []

    def note(work, job, count, *rest):
        jobs.append((work, job, count))
        return [Row("kernel", job.kernel, ABSENT if job.kernel == "te" else OK, "")]

    monkeypatch.setattr(gpu_check, "guarded", note)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    rows = gpu_check.all_rows(SimpleNamespace(device="cuda", quick=True, time_limit=9))
    assert {job.kernel for work, job, _ in jobs if work is check_ranks} == {"flash", "sdpa", "reference"}
    assert [job.nccl for work, job, _ in jobs if work is check_ranks and job.kernel == "sdpa"] == over
    overlap = [(job.nccl, count) for work, job, count in jobs if work is check_overlap]
    assert overlap == ([(True, ranks)] if gpus > 1 else [])
    shared = [row for row in rows if "gloo stages through the host" in row.figure]
    assert len(shared) == (2 if gpus == 1 else 0)
    assert all(row.result == NOT_APPLICABLE for row in shared)
