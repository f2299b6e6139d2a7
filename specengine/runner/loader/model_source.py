"""A model that was found by name and is ready to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.core.pooling import Pooling
from specengine.layers.rotary import longest_context


@dataclass(frozen=True)
class ModelSource:
    """Files of a model: exactly one of `directory`, `gguf_file` and `is_shape` is set.

    With `is_dummy` the weights are random, and only configuration and tokenizer are read.
    quantization: what the files say of quantised weights (`quant_method` …); empty for none.
    """

    name: str
    hf_config: Any
    directory: Path | None = None
    gguf_file: Path | None = None
    is_dummy: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    quantization: dict[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None  # of an embedding model
    # Fields of SamplingParams, by name, for requests of a server that leave them out.
    sampling_defaults: dict[str, float] = field(default_factory=dict)

    @property
    def is_shape(self) -> bool:
        """A built-in shape: a configuration without files."""
        return self.directory is None and self.gguf_file is None

    @property
    def architectures(self) -> list[str]:
        return list(getattr(self.hf_config, "architectures", None) or [])

    @property
    def dtype(self) -> str | None:
        """The name of that of the weights, such as bfloat16, where the configuration says it."""
        found = getattr(self.hf_config, "dtype", None)
        return None if found is None else str(found).removeprefix("torch.")

    @property
    def context_length(self) -> int:
        """Raises ModelLoadError where the configuration does not say."""
        found = getattr(self.hf_config, "max_position_embeddings", None)
        if not isinstance(found, int):
            raise ModelLoadError(f"config.json of {self.name} lacks max_position_embeddings")
        return found

    @property
    def longest_context(self) -> int:
        """What --context-length may ask for, at most."""
        return longest_context(self.hf_config)
