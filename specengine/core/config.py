"""One frozen, composed configuration. Flags, environment keys and YAML keys come from its fields.

A field `memory.page_size` is the flag `--page-size`, the variable SPECENGINE_PAGE_SIZE and the
YAML key `page_size`; fields of SpecConfig carry the prefix `speculative`. "auto" values are
resolved once (engine/resolve.py), before the configuration is frozen; nothing rewrites it at run
time.

Every section checks the type and range of its fields when it is made, and raises ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from specengine.core.graph_config import GraphConfig
from specengine.core.limits import LimitConfig
from specengine.core.memory_config import MemoryConfig
from specengine.core.operation import OperationConfig
from specengine.core.options import option
from specengine.core.parallel_config import ParallelConfig
from specengine.core.registry import (
    ATTENTION_BACKENDS,
    DRAFTERS,
    LOAD_QUANTIZATIONS,
    PLATFORMS,
    VERIFIERS,
)
from specengine.core.section import Section
from specengine.core.split_config import SplitConfig
from specengine.core.together import check_together
from specengine.core.trace_config import TraceConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    model: str = option("smollm2", "built-in name, directory of safetensors, GGUF file, or hub id")
    served_model_name: str | None = option(
        None, "names in the API, separated by commas; default: the model's own"
    )
    load_format: str = option(
        "auto", "where weights come from", ("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto", "weights and activations", ("auto", "float32", "bfloat16", "float16")
    )
    quantization: str | None = option(
        None,
        "quantise weights while they are loaded: fp8 on a GPU, int8 and int4 on CPU; gguf: keep a "
        "file's 4 or 8 bits",
        (None, "int8", "int4", *LOAD_QUANTIZATIONS),
    )
    kv_cache_dtype: str = option(
        "auto",
        "K and V in memory: as activations, or fp8 with the checkpoint's scales",
        ("auto", "fp8"),
    )
    device: str = option("auto", "where the model runs", ("auto", *PLATFORMS))
    context_length: int | None = option(None, "tokens a request may have; default: the model's own")
    attention_backend: str = option("auto", "attention kernels", ("auto", *ATTENTION_BACKENDS))
    prefill_attention_backend: str | None = option(
        None, "attention kernels for prompts, if others", (None, *ATTENTION_BACKENDS)
    )
    decode_attention_backend: str | None = option(
        None,
        "attention kernels for decoding and verification, if others",
        (None, *ATTENTION_BACKENDS),
    )
    draft_attention_backend: str | None = option(
        None, "attention kernels of a drafter's model, if others", (None, *ATTENTION_BACKENDS)
    )
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template")
    cache_dir: str | None = option(None, "where converted models are kept")
    random_seed: int = option(0, "seeds dummy weights and requests that bring no seed")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Those that were given; answers carry the first."""
        given = self.served_model_name
        return () if given is None else tuple(name.strip() for name in given.split(","))

    def _check_ranges(self) -> None:
        self._require(bool(self.model.strip()), "model", "name a model; see `specengine models`")
        self._require(
            self.served_model_name is None or all(self.served_names),
            "served_model_name",
            "must be a name, or several such as small,tiny",
        )
        self._at_least(1, "context_length")
        self._at_least(0, "random_seed")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    max_running_requests: int | None = option(
        None, "requests decoded together; default 256, CPU 32"
    )
    chunked_prefill_size: int | None = option(
        None, "prompt tokens a forward; default about 8192 on a GPU, 512 on CPU; -1 never splits"
    )
    enable_mixed_chunk: bool = option(False, "let decoding requests ride along in prefill batches")
    disable_overlap_schedule: bool = option(
        False, "wait for each round on a GPU before the next is launched"
    )
    enable_plan_stream: bool = option(
        False, "plan verifications beside their drafts, for attention that is planned on the host"
    )
    max_queued_requests: int = option(4096, "waiting requests before new ones are refused (503)")

    def _check_ranges(self) -> None:
        size = self.chunked_prefill_size
        self._require(
            size is None or size == -1 or size >= 1,
            "chunked_prefill_size",
            "must be at least 1, or -1 to never split a prompt",
        )
        self._at_least(1, "max_running_requests", "max_queued_requests")


_DEFAULT_NODES = 8
DRAFT_MODEL = "a draft model"  # owns options of all algorithms that draft with one
_model = partial(option, owners=(DRAFT_MODEL,))
_ngram = partial(option, owners=("NGRAM",))
_suffix = partial(option, owners=("SUFFIX", "hybrid_suffix"))
_relaxed = partial(option, owners=("relaxed",))


@dataclass(frozen=True, kw_only=True)
class SpecConfig(Section):
    """Owners of its options are names of DRAFTERS, of VERIFIERS or of its own fields, or
    DRAFT_MODEL."""

    flag_prefix: ClassVar[str] = "speculative_"

    algorithm: str | None = option(
        None, f"how to draft: {', '.join(DRAFTERS)}; default: not at all"
    )
    draft_model_path: str | None = _model(
        None,
        "draft model: a directory, hub id or built-in name; default: the one that ships, if any",
    )
    token_map: str | None = _model(
        None,
        "file of the token ids that an EAGLE draft may say, the others' rows of its head are not "
        "computed: JSON, safetensors, or SGLang's .pt; `specengine data token-map` makes one",
    )
    num_steps: int | None = _model(None, "depth of a draft model's drafts; default 3")
    adaptive: bool = option(
        True, "draft as deep as it pays, or not at all, by measured cost and running acceptance"
    )
    cost_table: str | None = option(
        None,
        "JSON file of round costs for adaptive, made where there is none yet; default: measured at "
        "start for drafters on a GPU, learned from the rounds for others",
    )
    eagle_topk: int = _model(1, "branches a draft model tries a token; 1 drafts a chain")
    num_draft_tokens: int | None = option(
        None, "nodes sent to verification, root included; default 8, for a model's chain steps + 1"
    )
    draft_sampling: bool = _model(
        False, "sample drafts from the draft model where requests sample; default: its best tokens"
    )
    static_tree: bool = _model(False, "shape a draft model's trees by rank, not by probability")
    verify: str = option(
        "auto",
        "which drafted tokens are accepted; a lossy rule, such as relaxed, says so in every result",
        ("auto", *VERIFIERS),
    )
    relaxed_top_k: int = _relaxed(3, "relaxed: tokens that may be accepted, the target's best")
    relaxed_delta: float = _relaxed(
        0.3, "relaxed: how much less probable than the best they may be"
    )
    ngram_branches: int = _ngram(1, "continuations tried a match; 1 drafts a chain, more a tree")
    ngram_min_match: int = _ngram(2, "shortest suffix that counts as a match, in tokens")
    ngram_max_match: int = _ngram(12, "longest suffix looked up, in tokens")
    ngram_shared_corpus: bool = _ngram(
        False, "also match earlier outputs of other requests (their text can show in timing)"
    )
    ngram_corpus_tokens: int = _ngram(1_000_000, "capacity of the shared corpus, in tokens")
    suffix_max_depth: int = _suffix(64, "longest stretch of text that is counted, in tokens")
    suffix_factor: float = _suffix(2.0, "tokens drafted a token that matches; see suffix_offset")
    suffix_offset: float = _suffix(1.0, "drafts have at most suffix_factor * match + this tokens")
    suffix_min_prob: float = _suffix(0.1, "smallest estimated probability of a drafted path")
    suffix_branches: int = _suffix(1, "continuations tried a token; 1 drafts a chain, more a tree")
    suffix_shared_corpus: bool = _suffix(
        False, "also match earlier outputs of other requests (their text can show in timing)"
    )
    suffix_corpus_tokens: int = _suffix(
        1_000_000, "capacity of the shared corpus, in tokens of about 150 bytes"
    )
    simulate_accept_length: float | None = option(
        None, "measure speed: force this accepted length on every round, whatever the output"
    )
    hybrid_suffix: bool = option(False, "let long suffix matches override the algorithm's drafts")
    hybrid_suffix_min_match: int = option(
        8, "shortest match that overrides, in tokens", owners=("hybrid_suffix",)
    )

    @property
    def max_nodes(self) -> int:
        """The most nodes of a draft, root included."""
        return _DEFAULT_NODES if self.num_draft_tokens is None else self.num_draft_tokens

    def _check_ranges(self) -> None:
        self._require(
            self.num_draft_tokens is None or self.num_draft_tokens >= 2,
            "num_draft_tokens",
            "must be at least 2, the root and one draft; leave --speculative-algorithm out for "
            "plain decoding",
        )
        for name in ("draft_model_path", "cost_table", "token_map"):
            self._require(getattr(self, name) != "", name, "must not be empty")
        self._at_least(1, "num_steps", "eagle_topk", "simulate_accept_length")
        self._at_least(1, "ngram_branches", "ngram_min_match", "ngram_corpus_tokens")
        self._require(
            self.ngram_max_match >= self.ngram_min_match,
            "ngram_max_match",
            f"must be at least --speculative-ngram-min-match ({self.ngram_min_match})",
        )
        self._check_suffix()
        self._at_least(1, "relaxed_top_k")
        self._require(0.0 <= self.relaxed_delta <= 1.0, "relaxed_delta", "must be between 0 and 1")

    def _check_suffix(self) -> None:
        self._at_least(2, "suffix_max_depth")
        self._at_least(0, "suffix_factor")
        self._at_least(1, "suffix_branches", "hybrid_suffix_min_match")
        self._at_least(4, "suffix_corpus_tokens")
        self._require(
            0.0 < self.suffix_min_prob <= 1.0,
            "suffix_min_prob",
            "must lie above 0 and be at most 1, such as 0.1",
        )
        self._require(
            not self.hybrid_suffix or self.hybrid_suffix_min_match < self.suffix_max_depth,
            "hybrid_suffix_min_match",
            f"matches stay below --speculative-suffix-max-depth ({self.suffix_max_depth})",
        )


# Names of the registries in server/tools and server/reasoning.
TOOL_PARSERS = (
    *("auto", "none", "deepseek_v3", "deepseek_v31", "glm45", "gpt_oss", "hermes", "llama3_json"),
    *("mistral", "pythonic", "qwen3_coder"),
)
REASONING_PARSERS = (
    *("auto", "none", "deepseek_r1", "deepseek_v3", "glm45", "gpt_oss", "mistral", "qwen3"),
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(OperationConfig):
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes any free one")
    api_key: str | None = option(None, "bearer token that requests must carry", is_secret=True)
    api_key_file: str | None = option(
        None, "file of more such tokens, one a line; lines that begin with # are left out"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that requests have to finish after SIGTERM, while new ones get a 503"
    )
    log_level: str = option("info", "how much is logged", ("debug", "info", "warning", "error"))
    log_format: str = option("text", "lines of the log: text, or an object each", ("text", "json"))
    tool_call_parser: str = option(
        "auto", "how the model writes tool calls; auto: by its chat template", TOOL_PARSERS
    )
    reasoning_parser: str = option(
        "auto", "how the model writes reasoning; auto: by its chat template", REASONING_PARSERS
    )

    sampling_defaults: str = option(
        "model",
        "temperature, top_p and others that a request leaves out: as the model's "
        "generation_config.json has them, or as OpenAI's protocol",
        ("model", "openai"),
    )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._require(bool(self.host), "host", "must not be empty; 0.0.0.0 listens everywhere")
        self._require(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        self._at_least(0, "shutdown_timeout")
        self._check_key("api_key")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)

    def __post_init__(self) -> None:
        check_together(self)

    @property
    def sums_in_one_kernel(self) -> bool:
        """Whether two ranks on GPUs sum few rows so, if they can. Unless set, they do where it was
        measured: where one engine's forwards are all on one stream."""
        if self.parallel.enable_symm_mem is not None:
            return self.parallel.enable_symm_mem
        return not self.parallel.enable_dp_attention and not self.split.enable_pdmux
