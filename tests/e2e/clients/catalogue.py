"""The clients, and what each needs beside itself. None installs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """script: of this folder, run in an environment with `packages`. bare: packages that are
    installed without what they depend on. version_of: distributions whose versions are reported.
    reference: script that the project's own Python runs before, and whose output the other gets.
    borrows_torch: what the environment lacks is taken from the project's."""

    name: str
    script: str
    packages: tuple[str, ...]
    version_of: tuple[str, ...]
    bare: tuple[str, ...] = ()
    reference: str | None = None
    borrows_torch: bool = False


# What lm-eval's model of a completions API imports.
_LM_EVAL = (
    *("aiohttp", "requests", "tenacity", "tqdm", "numpy", "jinja2", "pyyaml", "datasets"),
    *("transformers", "evaluate", "sqlitedict", "more_itertools", "pytablewriter", "dill"),
    *("word2number", "zstandard", "rouge-score", "sacrebleu", "scikit-learn", "typing_extensions"),
)
# guidellm's own list, without torch.
_GUIDELLM = (
    *("click", "culsans", "datasets", "eval_type_backport", "faker", "ftfy", "httpx[http2]"),
    *("loguru", "msgpack", "numpy", "protobuf", "pydantic", "pydantic-settings", "pyyaml", "rich"),
    *("sanic", "tabulate", "transformers", "uvloop", "more-itertools", "typing-extensions"),
    *("websockets",),
)

CLIENTS = (
    Client("openai", "openai_sdk.py", ("openai",), ("openai",)),
    Client("litellm", "litellm_sdk.py", ("litellm",), ("litellm",)),
    Client(
        "langchain-openai",
        "langchain_agents.py",
        ("langchain", "langchain-openai"),
        ("langchain", "langchain-openai"),
    ),
    Client(
        "llama-index",
        "llama_index_llm.py",
        ("llama-index-core", "llama-index-llms-openai-like"),
        ("llama-index-core", "llama-index-llms-openai-like"),
    ),
    Client("instructor", "instructor_models.py", ("instructor",), ("instructor",)),
    Client(
        "pydantic-ai", "pydantic_ai_output.py", ("pydantic-ai-slim[openai]",), ("pydantic-ai-slim",)
    ),
    Client(
        "lm-eval",
        "lm_eval_loglikelihood.py",
        _LM_EVAL,
        ("lm-eval",),
        bare=("lm-eval",),
        reference="loglikelihood_reference.py",
    ),
    Client(
        "guidellm",
        "guidellm_benchmark.py",
        _GUIDELLM,
        ("guidellm",),
        bare=("guidellm",),
        borrows_torch=True,
    ),
    Client("aiperf", "aiperf_profile.py", ("aiperf",), ("aiperf",)),
    Client("what open-webui 0.12.4 sends", "open_webui_bodies.py", ("httpx",), ("httpx",)),
)
