"""Rates of a kernel on one long block, against the device's peak: the second part of scripts/gpu_check.sh."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable

import torch

from megatron_mesh_cp.cli.gpu_check_rows import FAIL, NOT_APPLICABLE, OK, Row
from megatron_mesh_cp.cluster import cluster_names, load_cluster
from megatron_mesh_cp.kernels import Kernel
from megatron_mesh_cp.merge import row_delta

_HEADS, _KV_HEADS, _DIM = 32, 8, 128
_TIMES_BACKWARD = 2.5  # FLOPs of a backward over those of a forward
# A card of the same name with another peak; the cluster files are of SXM modules.
_OTHER_FORMS = ("PCIE", "NVL")


def rate_rows(kernel: Kernel, name: str, device: torch.device, quick: bool) -> list[Row]:
    """TFLOP/s forward and backward, full and causal, bf16, on a block that shortens until it fits the memory."""
    on_gpu = device.type == "cuda"
    length = 128 if not on_gpu else 2048 if name == "reference" else 8192  # reference keeps all scores, in fp32
    peak = peak_of(torch.cuda.get_device_name(device)) if on_gpu else None
    unknown = "unknown peak" if on_gpu else "peak: not applicable on CPU"
    while True:
        try:
            return _rates(kernel, name, device, length, 3 if quick else 10, peak, unknown)
        except torch.cuda.OutOfMemoryError:
            if length <= 512:
                return [Row(f"rate, {length} x {length}", name, FAIL, "not enough GPU memory")]
            torch.cuda.empty_cache()
            length //= 2


def _rates(
    kernel: Kernel, name: str, device: torch.device, length: int, repeats: int, peak: float | None, unknown: str
) -> list[Row]:
    g = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (
        torch.randn(length, 1, heads, _DIM, device=device, dtype=torch.bfloat16, generator=g).permute(1, 2, 0, 3)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    )
    rows, scale = [], _DIM**-0.5
    for causal in (False, True):
        out, lse = kernel.forward(q, k, v, causal, scale)
        out = out.to(q.dtype)
        delta = row_delta(dout, out)
        given = out if kernel.wants_out else None
        flops = 4 * length**2 * _HEADS * _DIM * (0.5 if causal else 1.0)
        mask = "causal" if causal else "full"
        for way, factor, call in (
            ("forward", 1.0, lambda c=causal: kernel.forward(q, k, v, c, scale)),
            (
                "backward",
                _TIMES_BACKWARD,
                lambda c=causal, o=given, s=lse, d=delta: kernel.backward(dout, q, k, v, o, s, d, c, scale),
            ),
        ):
            seconds = median_seconds(call, device, repeats)
            check = f"rate {way}, {mask}, {length} x {length}, heads {_HEADS}/{_KV_HEADS} x {_DIM}, bf16"
            rows.append(rate_row(check, name, factor * flops, seconds, peak, unknown))
    return rows


def rate_row(check: str, kernel: str, flops: float, seconds: float, peak: float | None, unknown: str) -> Row:
    """The verdict on a rate. peak: FLOP/s, None where it is not known; `unknown` is said then, and nothing judged.

    A rate above the peak means that work was skipped or that the clock is wrong, and so does one that is no number.
    """
    rate = flops / seconds if seconds > 0 else math.inf
    figure = f"{rate / 1e12:.3g} TFLOP/s ({1e3 * seconds:.3g} ms)"
    if not 0 < rate < math.inf:
        return Row(check, kernel, FAIL, figure, "a positive rate")
    if peak is None:
        return Row(check, kernel, NOT_APPLICABLE, figure, unknown)
    figure += f" = {rate / peak:.1%} of the peak"
    return Row(check, kernel, OK if rate <= peak else FAIL, figure, f"at most {peak / 1e12:g} TFLOP/s")


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call after two for warm-up: by CUDA events, on the CPU by the clock."""
    times = []
    for number in range(repeats + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if number > 1:
            times.append(seconds)
    return statistics.median(times)


def peak_of(device_name: str) -> float | None:
    """FLOP/s of the device that torch calls so, as configs/clusters has it (bf16, dense); None where it has not.

    "NVIDIA H100 80GB HBM3" is the "NVIDIA H100 SXM 80GB" of h100-ndr.yaml; "NVIDIA H100 PCIe" is another card.
    """
    words = re.split(r"[\s\-]+", device_name.upper())
    if words[0] != "NVIDIA" or any(form in words for form in _OTHER_FORMS):
        return None
    for name in cluster_names():
        cluster = load_cluster(name)
        maker, *model = cluster.device.upper().split()
        if maker == "NVIDIA" and model and model[0] in words[1:2]:
            return cluster.peak_flops
    return None
