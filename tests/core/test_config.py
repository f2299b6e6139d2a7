from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specengine.core.config import EngineConfig, MemoryConfig, SpecConfig
from specengine.core.config_sources import (
    OTHER_VARIABLES,
    config_from_flags,
    config_options,
    resolve_sources,
    shown,
    to_yaml,
)
from specengine.core.errors import ConfigError


def resolve(
    flags: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    file: Path | None = None,
) -> EngineConfig:
    return resolve_sources(flags or {}, environment or {}, file)


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "page_size: 2\nport: 2\ncontext_length: 2\n")
    environment = {"SPECENGINE_PAGE_SIZE": "4", "SPECENGINE_PORT": "4"}
    config = resolve({"page_size": 8}, environment, file)
    assert config.memory.page_size == 8
    assert config.server.port == 4
    assert config.model.context_length == 2
    assert config.model.model == "smollm2"


def test_spec_fields_carry_a_prefix() -> None:
    config = resolve({}, {"SPECENGINE_SPECULATIVE_ALGORITHM": "NGRAM"})
    assert config.spec.algorithm == "NGRAM"
    option = config_options()["speculative_num_draft_tokens"]
    assert option.flag == "--speculative-num-draft-tokens"


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("DISABLE_RADIX_CACHE", "true", True),
        ("DISABLE_RADIX_CACHE", "0", False),
        ("MEM_FRACTION_STATIC", "0.5", 0.5),
        ("CUDA_GRAPH_BS", "1,2, 4 8", (1, 2, 4, 8)),
        ("QUANTIZATION", "none", None),
        ("SPECULATIVE_ALGORITHM", "None", None),
        ("LOG_LEVEL", "DEBUG", "debug"),
    ],
)
def test_values_from_text(variable: str, text: str, value: object) -> None:
    config = resolve({}, {f"SPECENGINE_{variable}": text})
    option = config_options()[variable.lower()]
    sections = [config.model, config.memory, config.graph, config.server, config.spec]
    (found,) = [getattr(s, option.name) for s in sections if option.name in s.options()]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise: 16", "page_sise.*did you mean page_size"),
        ("page_size: '16'", "page_size must be a whole number, got '16'"),
        ("page_size: true", "page_size must be a whole number"),
        ("page_size: null", "page_size must be a whole number"),
        ("disable_radix_cache: 1", "disable_radix_cache must be true or false"),
        ("cuda_graph_bs: [1, a]", "cuda_graph_bs must be a list"),
        ("dtype: int8", "dtype must be one of auto, float32"),
        ("mem_fraction_static: .nan", "mem_fraction_static must be a number"),
        ("- page_size", "key: value"),
        ("page_size: [", "cannot read"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(file=write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read --config"):
        resolve(file=tmp_path / "absent.yaml")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert resolve(file=write(tmp_path, "# nothing\n")) == EngineConfig()


def test_a_bad_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="SPECENGINE_PORT must be a whole number, got 'tcp:"):
        resolve({}, {"SPECENGINE_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SPECENGINE_PAGESIZE", "PAGESIZE is not known; did you mean SPECENGINE_PAGE_SIZE"),
        ("SPECENGINE_DATADIR", "DATADIR is not known; did you mean SPECENGINE_DATA_DIR"),
        ("SPECENGINE_QQQQQQQQQQQQ", "QQQQQQQQQQQQ is not known; unset it"),
    ],
)
def test_an_unknown_variable_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({}, {name: "16"})


def test_every_variable_the_sources_read_is_allowed() -> None:
    """Those that are no option are listed by hand."""
    root = Path(__file__).parents[2]
    folders = (root / name for name in ("specengine", "draft", "target", "kernels"))
    texts = [path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")]
    used = set(re.findall(r'"(SPECENGINE_[A-Z0-9_]+)"', "\n".join(texts)))
    assert "SPECENGINE_CACHE_DIR" in used
    assert set(OTHER_VARIABLES) < used
    resolve({}, {"PORT_": "1", **dict.fromkeys(sorted(used), "0")})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"page_size": 3}, "--page-size 3: must be a power of two"),
        ({"page_size": 0}, "--page-size 0"),
        ({"port": 65536}, "--port 65536"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static"),
        ({"mem_fraction_static": 1.1}, "--mem-fraction-static"),
        ({"max_total_tokens": 0}, "--max-total-tokens"),
        ({"max_total_tokens": 15, "page_size": 16}, "--max-total-tokens"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0"),
        ({"cuda_graph_bs": ()}, "--cuda-graph-bs"),
        ({"cuda_graph_bs": (0, 1)}, "--cuda-graph-bs"),
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1"),
        ({"speculative_ngram_min_match": 9, "speculative_ngram_max_match": 8}, "ngram-max-match 8"),
        ({"api_key": ""}, "--api-key"),
        ({"model": " "}, "specengine models"),
        ({"quantization": "int3"}, "--quantization must be one of none, int8, int4"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_flags(values)


def test_boundary_values_pass() -> None:
    config_from_flags(
        {
            "page_size": 64,
            "port": 0,
            "mem_fraction_static": 1,
            "chunked_prefill_size": -1,
            "cuda_graph_bs": [1],
            "speculative_num_draft_tokens": 2,
            "speculative_ngram_min_match": 3,
            "speculative_ngram_max_match": 3,
        }
    )


def test_sections_check_themselves() -> None:
    with pytest.raises(ConfigError, match="--page-size must be a whole number"):
        MemoryConfig(page_size=2.0)  # type: ignore[arg-type]


def test_a_spec_config_stands_for_its_section() -> None:
    spec = SpecConfig(algorithm="NGRAM", num_draft_tokens=4)
    assert config_from_flags({"page_size": 2}, spec).spec is spec
    with pytest.raises(ConfigError, match="given twice"):
        config_from_flags({"speculative_algorithm": "NGRAM"}, spec)


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    config = config_from_flags(
        {"cuda_graph_bs": (1, 2), "host": "yes: #", "speculative_algorithm": "NGRAM"}
    )
    text = to_yaml(config)
    assert set(yaml.safe_load(text)) == set(config_options())
    assert resolve(file=write(tmp_path, text)) == config


def test_a_key_is_not_shown_and_must_be_given_anew(tmp_path: Path) -> None:
    config = config_from_flags({"api_key": "s3cret"})
    text = to_yaml(config)
    assert not [found for found in (text, repr(config), str(shown(config))) if "s3cret" in found]
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"--api-key.*not printed; give the key"):
        resolve(file=file)
    assert resolve({"api_key": "s3cret"}, file=file) == config
