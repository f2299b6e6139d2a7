"""One frozen, composed configuration. Flags, environment keys and YAML keys come from its fields.

A field `memory.page_size` is the flag `--page-size`, the variable SPECENGINE_PAGE_SIZE and the YAML
key `page_size`; fields of SpecConfig carry the prefix `speculative`. "auto" values are resolved once
(engine/build.py), before the configuration is frozen; nothing rewrites it at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A configuration field with its help text, and the values it may take."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "smollm2", "built-in name, directory of safetensors, GGUF file, or hub id"
    )
    served_model_name: str | None = option(None, "name in the API; default: the model's own")
    load_format: str = option(
        "auto", "where weights come from", ("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto", "weights and activations", ("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(None, "weight-only quantization on CPU", (None, "int8", "int4"))
    device: str = option("auto", "where the model runs", ("auto", "cpu", "cuda"))
    context_length: int | None = option(None, "tokens a request may have; default: the model's own")
    attention_backend: str = option("auto", "attention kernels", ("auto", "torch", "triton"))
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template")
    cache_dir: str | None = option(None, "where converted models are kept")
    random_seed: int = option(0, "seeds dummy weights and requests that bring no seed")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    mem_fraction_static: float | None = option(
        None, "share of memory for weights and KV; default 0.88 on a GPU, 0.5 on CPU"
    )
    max_total_tokens: int | None = option(None, "KV slots; default: what the memory allows")
    page_size: int = option(1, "KV slots a page")
    disable_radix_cache: bool = option(False, "keep no KV of finished requests")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    max_running_requests: int | None = option(None, "requests decoded together; default 256, CPU 32")
    chunked_prefill_size: int | None = option(
        None, "prompt tokens a forward; default 8192 on a GPU, 512 on CPU; -1 never splits"
    )
    enable_mixed_chunk: bool = option(False, "let decoding requests ride along in prefill batches")
    max_queued_requests: int = option(4096, "waiting requests before new ones are refused (503)")


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    disable_cuda_graph: bool = option(False, "run every forward eagerly")
    cuda_graph_bs: tuple[int, ...] | None = option(None, "batch sizes to capture")
    cuda_graph_max_bs: int | None = option(None, "largest batch size to capture; default 256")
    disable_cuda_graph_padding: bool = option(False, "replay only at exactly captured sizes")


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    algorithm: str | None = option(None, "how to draft; default: no speculation")
    num_draft_tokens: int = option(8, "nodes sent to verification, the root included")
    ngram_branches: int = option(1, "continuations tried a match; 1 drafts a chain, more a tree")
    ngram_min_match: int = option(2, "shortest suffix that counts as a match, in tokens")
    ngram_max_match: int = option(12, "longest suffix looked up, in tokens")
    ngram_shared_corpus: bool = option(
        False, "also match earlier outputs of other requests (their text can show in timing)"
    )
    ngram_corpus_tokens: int = option(1_000_000, "capacity of the shared corpus, in tokens")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    api_key: str | None = option(None, "bearer token that requests must carry")
    log_level: str = option("info", "how much is logged", ("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
