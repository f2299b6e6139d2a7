"""generation_config.json of a model directory: which tokens end a text, and how tokens are chosen
where a request does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.core.errors import ModelLoadError, RequestError
from specengine.core.sampling import SamplingParams
from specengine.runner.loader.hf_directory import read_json

# Fields of SamplingParams that transformers has under the same names.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_eos_token_ids(directory: Path, config: Any) -> frozenset[int]:
    """Tokens that end a text: of generation_config.json, or else of config.json."""
    found = _read(directory).get("eos_token_id")
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """Fields of SamplingParams that the file has, by name. Raises ModelLoadError where one has a
    value that no request may have."""
    fields = _read(directory)
    found = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelLoadError(
            f"{_path(directory)}: {error}; mend it, or serve with --sampling-defaults openai"
        ) from error
    return found


def _read(directory: Path) -> dict[str, Any]:
    path = _path(directory)
    return read_json(path) if path.is_file() else {}


def _path(directory: Path) -> Path:
    return directory / "generation_config.json"
