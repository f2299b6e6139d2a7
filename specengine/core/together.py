"""Which options do not go together, whatever the model: refused before anything is loaded.

What depends on the model, on the attention backend or on the hardware as well is refused where
that is known (engine/split_build.py, engine/sharing.py, engine/llm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specengine.core.errors import ConfigError
from specengine.core.registry import LOAD_QUANTIZATIONS

# How messages name an option, and whether an EngineConfig, which imports this, has it.
GIVEN: Mapping[str, Callable[[Any], bool]] = {
    "--tp-size": lambda config: config.parallel.tp_size > 1,
    "--dp-size": lambda config: config.parallel.dp_size > 1,
    "--enable-dp-attention": lambda config: config.parallel.enable_dp_attention,
    "--enable-symm-mem": lambda config: bool(config.parallel.enable_symm_mem),
    "--enable-pdmux": lambda config: config.split.enable_pdmux,
    "--enable-mixed-chunk": lambda config: config.schedule.enable_mixed_chunk,
    "--enable-sleep-mode": lambda config: config.memory.enable_sleep_mode,
    "--cuda-graph-mode with pieces": lambda config: config.graph.has_pieces,
    "--cuda-graph-profile": lambda config: config.graph.cuda_graph_profile is not None,
    "--cuda-graph-profile FILE": (
        lambda config: config.graph.cuda_graph_profile not in (None, "log")
    ),
    "--disable-cuda-graph-padding": lambda config: config.graph.disable_cuda_graph_padding,
    "--speculative-cost-table": lambda config: config.spec.cost_table is not None,
    "--trace": lambda config: config.trace.trace is not None,
    "--quantization int8 or int4": (
        lambda config: config.model.quantization not in (None, *LOAD_QUANTIZATIONS)
    ),
}

REFUSED: tuple[tuple[str, str], ...] = (
    ("--enable-pdmux", "--enable-mixed-chunk"),
    ("--enable-pdmux", "--enable-dp-attention"),  # forwards of ranks meet whole
    ("--enable-pdmux", "--enable-symm-mem"),  # forwards of two streams would meet in one kernel
    ("--quantization int8 or int4", "--tp-size"),
    ("--speculative-cost-table", "--enable-dp-attention"),
    ("--disable-cuda-graph-padding", "--enable-dp-attention"),  # rounds of ranks have one size
    ("--cuda-graph-profile", "--enable-dp-attention"),
    ("--cuda-graph-profile FILE", "--dp-size"),  # all engines would write there
    ("--trace", "--dp-size"),  # all engines would write there
)


def check_together(config: Any) -> None:
    """config: an EngineConfig. Raises ConfigError, naming the first pair that is refused."""
    for one, other in REFUSED:
        if GIVEN[one](config) and GIVEN[other](config):
            raise ConfigError(f"{one} does not go together with {other}: leave one of the two out")
