"""NVIDIA GPUs, and AMD's through PyTorch's same names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.core.platform import DeviceMemory, Event, Graph, KernelSpan, Platform, Stream
from specengine.core.platforms import cuda_streams
from specengine.core.platforms.cuda_region import CudaRegion
from specengine.core.region import Region

T = TypeVar("T")


class CudaMemory(DeviceMemory):
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def used(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def current(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class CudaPlatform(Platform):
    is_accelerator = True
    has_graphs = True
    precompiles = True
    attention_backend = None

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def num_devices(self) -> int:
        return torch.cuda.device_count()

    def device_name(self, device: torch.device) -> str:
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"

    def use_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def memory(self, device: torch.device) -> DeviceMemory:
        return CudaMemory(device)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def held_memory(self) -> int:
        return torch.cuda.memory_reserved()

    def new_region(self) -> Region:
        return CudaRegion()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def new_event(self, timing: bool = False) -> Event:
        event: Any = torch.cuda.Event
        made: Event = event(enable_timing=timing)
        return made

    def new_stream(self) -> Stream:
        return cuda_streams.new_stream(torch.cuda.current_device())

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def read_on(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture_stream(self) -> Stream:
        return cuda_streams.capture_streams(torch.cuda.current_device()).main

    def record(self, run: Callable[[], T], pool: Any, stream: Any) -> tuple[Graph, T]:
        """Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        given: dict[str, Any] = {"pool": pool, "stream": stream}
        # Where the end of a capture raises, as after a launch that may not be captured, PyTorch
        # leaves `stream` the current one: rounds and prompts would go on there.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, capture_error_mode="thread_local", **given),
        ):
            output = run()
        return graph, output

    def kernel_spans(self, run: Callable[[], object]) -> list[KernelSpan]:
        from specengine.core.platforms.cuda_profile import kernel_spans

        return kernel_spans(run)
