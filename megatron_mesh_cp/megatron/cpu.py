"""CPU ranks: let the unmodified `megatron.training.pretrain()` run on gloo ranks, where there is no GPU.

Megatron names the device "cuda" in hundreds of places. `enable_cpu_ranks()` makes that name mean the CPU for
this process and thread: a torch function mode rewrites the device of every torch call, and the few functions
of `torch.cuda` that Megatron asks about devices, streams and generators answer for the CPU. Where CUDA is
available nothing at all is changed, so an entry point may call it unconditionally.

Run such ranks with `--distributed-backend gloo --transformer-impl local --no-persist-layer-norm
--no-rope-fusion --no-gradient-accumulation-fusion`; Transformer Engine and Apex kernels stay GPU only.
"""

import logging
import sys
from functools import partial
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_done: set[str] = set()  # the parts that are patched: "core", "training"


def enable_cpu_ranks(*, training: bool = False) -> bool:
    """Make "cuda" mean "cpu" for Megatron in this thread; harmless to call again.

    Call it before anything imports Megatron, so that its fused functions stay plain Python. Called later it
    has torch run every compiled function of the process eagerly (`torch.compiler.set_stance`).

    Args:
        training: patch `megatron.training`'s loop as well, which is what `pretrain()` needs.

    Returns:
        True where the patches are on, False where CUDA is available and nothing was touched.

    Raises:
        ModuleNotFoundError: megatron-core (or, with `training`, `megatron.training`) is not installed.
    """
    if torch.cuda.is_available():
        return False
    if "core" not in _done:
        _patch_core()
        _done.add("core")
    if training and "training" not in _done:
        _patch_training()
        _done.add("training")
    return True


class _CudaMeansCpu(TorchFunctionMode):
    """Sends `device="cuda"`, `.cuda()`, `.to("cuda")` and `pin_memory=True` to the CPU in all torch calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:  # the one call where Megatron passes the device by position
            args = tuple(_CPU if _names_cuda(arg) else arg for arg in args)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            # Megatron's optimizers accept parameters whose type() reads "torch.cuda.FloatTensor", no other.
            out = out.replace("torch.", "torch.cuda.", 1)
        return out


def _names_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _InOrder:
    """Stands for a CUDA stream or event: on the CPU a call is finished when it returns, nobody waits."""

    def __init__(self, *args, **kwargs):  # what torch.cuda.Stream takes: a device, a priority
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> "_InOrder":
        return _InOrder() if event is None else event

    def synchronize(self) -> None:
        pass


def _splits_to_numpy(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_core() -> None:
    rng = _import_random_without_compiling()
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    cuda = torch.cuda
    # Used as an index and as a device; a torch.device("cpu") serves as both.
    cuda.current_device = lambda: _CPU
    # With 0 devices Megatron skips building its process groups and seeding its generators.
    cuda.device_count = lambda: 1
    # Asked for the architecture (major) and the name only; 10 passes the checks made for older GPUs.
    cuda.get_device_properties = lambda *device: SimpleNamespace(name="cpu", major=10, minor=0)
    cuda.set_device = lambda *device: None  # one device, already set
    cuda.synchronize = lambda *device: None  # nothing runs behind the caller's back
    cuda.Stream = _InOrder  # DDP builds its buckets on a side stream, MoE copies its token counts on one
    cuda.current_stream = lambda *device: _InOrder()  # and makes it wait for this one
    # The CPU generator plays the CUDA one: Megatron's tracker swaps its state in and out, as on a GPU.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = lambda *device: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *device: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *device, **options: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *device, **options: torch.set_rng_state(state)
    # The tracker warns that a fork changed the CPU generator, which is what is wanted here.
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)
    # The dispatcher turns its split sizes into numpy while copying them off the GPU, and only then.
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_numpy
    _CudaMeansCpu().__enter__()  # never left: it is on for the life of the process


def _import_random_without_compiling():
    """Import Megatron's random module; its fused functions stay plain Python instead of compiled ones."""
    if "megatron.core.jit" in sys.modules:
        torch.compiler.set_stance("force_eager")  # too late to keep them plain: have them run eagerly
        import megatron.core.tensor_parallel.random as rng

        return rng
    compile_ = torch.compile
    torch.compile = lambda model=None, **options: model if model is not None else (lambda fn: fn)
    try:
        import megatron.core.tensor_parallel.random as rng
    finally:
        torch.compile = compile_
    return rng


def _patch_training() -> None:
    import megatron.training.training as loop

    # Its check `torch.cuda.is_available()` has a way round for data processing; take it.
    loop.initialize_megatron = partial(loop.initialize_megatron, allow_no_cuda=True)
    # The warm-up of fused kernels there draws from the CPU generator, and there are no such kernels.
    loop.set_jit_fusion_options = lambda *args, **kwargs: None
    import megatron.training.initialize as initialize

    if hasattr(initialize, "fused_kernels"):  # 0.16 looks for nvcc, to build kernels that only legacy models use
        initialize.fused_kernels.load = lambda args: None
