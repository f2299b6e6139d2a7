"""Parts of vLLM and SGLang that compute experts, imported without the rest of either package.

Their files of Triton kernels and what chooses the kernels' tiles are run as they are; for the other
modules that those import, stubs stand in this process, which say what holds on one NVIDIA GPU. So
neither package's own requirements need be installed, and in a process that has called this neither
package can be imported whole.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.library_products import EMPTY_SUM, sglang_ops, vllm_ops
from specengine.kernels.linear.quantised import FP8, FP8_MAX

VLLM = "vllm.model_executor.layers.fused_moe"
SGLANG = "sglang.srt.layers.moe.moe_runner.triton_utils"
NO = SimpleNamespace(get=lambda: False)  # a switch


@cache
def folder_of(package: str) -> Path:
    """Raises ImportError where it is not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def stub(name: str, **members: Any) -> ModuleType:
    """A package of that name with these members alone, and its parents where there are none."""
    made = ModuleType(name)
    made.__path__ = []
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    vars(made).update(members)
    return _put(name, made)


def _put(name: str, module: ModuleType) -> ModuleType:
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or stub(parent), own, module)
    sys.modules[name] = module
    return module


def run_file(name: str, path: Path) -> ModuleType:
    """The module of that name from its file; stubs take the place of packages above it."""
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"{path} is missing")
    module = _put(name, module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@cache
def vllm_moe_ops() -> Any:
    """What vLLM has compiled for experts."""
    for file in sorted(folder_of("vllm").glob("_moe_C*.so")):
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
    return torch.ops._moe_C


def vllm_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x and scales of each 128 columns, by vLLM's kernel."""
    codes = torch.empty_like(x, dtype=FP8)
    scale = x.new_empty(len(x), x.shape[1] // 128, dtype=torch.float32)
    torch.ops._C.per_token_group_fp8_quant(
        *(x, codes, scale, 128, EMPTY_SUM, -FP8_MAX, FP8_MAX, False, False, False)
    )
    return codes, scale


def _vllm_input(
    A: Tensor,
    A_scale: Tensor | None,
    quant_dtype: torch.dtype | None,
    per_act_token_quant: bool,
    block_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    if quant_dtype is None:
        return A, A_scale
    assert block_shape == [128, 128], "no other rounding is measured"
    return vllm_rounded(A)


@cache
def vllm_fused_moe() -> Any:
    """vLLM's module of that name, with `fused_experts_impl`."""
    triton, tl = import_module("triton"), import_module("triton.language")
    folder = folder_of("vllm")
    vllm_ops(), vllm_moe_ops()
    loud = SimpleNamespace(info_once=_nothing, warning_once=_warn)
    stub("vllm")
    stub("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None)
    stub("vllm.logger", init_logger=lambda _: loud)
    stub(
        "vllm._custom_ops",
        moe_sum=lambda *given: vllm_moe_ops().moe_sum(*given),
        moe_align_block_size=lambda *given: vllm_moe_ops().moe_align_block_size(*given),
    )
    stub("vllm.triton_utils", triton=triton, tl=tl)
    stub("vllm.utils.math_utils", round_up=lambda x, unit: -(-x // unit) * unit)
    stub("vllm.utils.torch_utils", direct_register_custom_op=_nothing)
    device = SimpleNamespace(
        get_device_name=_device_name,
        fp8_dtype=lambda: FP8,
        is_cuda=lambda: True,
        is_rocm=lambda: False,
    )
    stub("vllm.platforms", current_platform=device)
    stub(VLLM, get_config=_nothing)
    halved = SimpleNamespace(adjust_N_for_activation=lambda width, _: width // 2)
    stub(f"{VLLM}.modular_kernel", FusedMoEExpertsModular=halved)
    stub(
        f"{VLLM}.config",
        FUSED_MOE_UNQUANTIZED_CONFIG=None,
        FusedMoEQuantConfig=object,
        _get_config_dtype_str=_vllm_config_name,
    )
    stub(f"{VLLM}.utils", moe_kernel_quantize_input=_vllm_input)
    files = folder / "model_executor" / "layers" / "fused_moe"
    for name in ("activation", "moe_align_block_size", "fused_moe"):
        module = run_file(f"{VLLM}.{name}", files / f"{name}.py")
    return module


def _vllm_config_name(use_fp8_w8a8: bool = False, **_: Any) -> str | None:
    return "fp8_w8a8" if use_fp8_w8a8 else None


@cache
def vllm_triton_kernels() -> Any:
    """The copy of triton_kernels in vLLM, under the name by which its files import each other."""
    if "triton_kernels" not in sys.modules:
        place = folder_of("vllm") / "third_party" / "triton_kernels"
        name = "triton_kernels"
        spec = spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        if spec is None or spec.loader is None or not place.exists():
            raise ImportError(f"{place} is missing")
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    parts = ("matmul_ogs", "routing", "swiglu", "tensor", "numerics", "tensor_details.layout")
    found = {one.rpartition(".")[2]: import_module(f"triton_kernels.{one}") for one in parts}
    flags = import_module("triton_kernels.matmul_ogs_details.opt_flags")
    flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    return SimpleNamespace(**found)


def sglang_rounded(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """Codes of x and scales of each 128 columns, by sglang-kernel."""
    codes = torch.empty_like(x, dtype=FP8)
    scale = x.new_empty(len(x), x.shape[1] // group, dtype=torch.float32)
    sglang_ops().sgl_per_token_group_quant_8bit_v2(
        *(x, codes, scale, group, EMPTY_SUM, -FP8_MAX, FP8_MAX, False, False, None)
    )
    return codes, scale


@cache
def sglang_fused_moe() -> Any:
    """SGLang's module of that name, with `fused_experts_impl`. Where it would compile kernels for
    an activation, for rounding and for the sum of up to 32 rows, it takes sglang-kernel's."""
    folder, kernels = folder_of("sglang"), import_module("sgl_kernel")
    switches = SimpleNamespace(
        enable_deterministic_inference=False, enable_fused_moe_sum_all_reduce=False
    )
    yes = dict.fromkeys(("is_cuda", "is_sm90_supported"), lambda: True)
    no = dict.fromkeys(("is_cpu", "is_hip", "is_musa", "is_xpu"), lambda: False)
    no |= dict.fromkeys(("cpu_has_amx_support", "use_intel_xpu_backend"), lambda: False)
    stub("sglang")
    stub(
        "sglang.srt.utils",
        **yes,
        **no,
        get_bool_env_var=lambda _: False,
        get_device_name=_device_name,
    )
    stub("sglang.srt.utils.custom_op", register_custom_op=lambda **_: lambda function: function)
    stub("sglang.srt.batch_invariant_ops", is_batch_invariant_mode_enabled=lambda: False)
    stub("sglang.srt.environ", envs=SimpleNamespace(SGLANG_EXPERIMENTAL_LORA_OPTI=NO))
    stub("sglang.srt.server_args", get_global_server_args=lambda: switches)
    stub("sglang.srt.layers.moe.utils", get_moe_padding_size=lambda _: 0)
    stub("sglang.srt.layers.moe.moe_runner", MoeRunnerConfig=SimpleNamespace)
    rounding = dict.fromkeys(("per_token_group_quant_fp8", "scaled_fp8_quant"))
    stub(
        "sglang.srt.layers.quantization.fp8_kernel",
        **rounding,
        sglang_per_token_group_quant_fp8=sglang_rounded,
    )
    ends = ("per_token_group_quant_int8", "per_token_quant_int8")
    rounding = dict.fromkeys((*ends, f"sglang_{ends[0]}"))
    stub("sglang.srt.layers.quantization.int8_kernel", **rounding)
    both = {"silu_and_mul": kernels.silu_and_mul, "gelu_and_mul": kernels.gelu_and_mul}
    stub("sglang.jit_kernel.activation", **both)
    stub(SGLANG, get_config=_nothing)
    files = folder.joinpath("srt", "layers", "moe", "moe_runner", "triton_utils")
    for name in ("_triton_config", "_triton_kernels"):
        run_file(f"{SGLANG}.fused_moe{name}", files / f"fused_moe{name}.py")
    run_file(f"{SGLANG}.moe_align_block_size", files / "moe_align_block_size.py")
    module: Any = run_file(f"{SGLANG}.fused_moe", files / "fused_moe.py")
    module.moe_sum_reduce_torch_compile = kernels.moe_sum_reduce
    return module


def _device_name() -> str:
    return torch.cuda.get_device_name()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _warn(message: str, *values: Any, **_: Any) -> None:
    print("vLLM:", message % values, flush=True)
