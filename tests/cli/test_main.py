"""Flags into configuration; errors into one line and an exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specengine import __version__
from specengine.cli.args import config_of, sampling_of
from specengine.cli.main import build_parser, main
from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError, ModelLoadError, RequestError
from specengine.core.sampling import SamplingParams


def parse(*argv: str) -> EngineConfig:
    return config_of(build_parser().parse_args(["serve", *argv]))


def sample(*argv: str) -> SamplingParams:
    return sampling_of(build_parser().parse_args(["generate", *argv]))


def test_flags_of_every_kind() -> None:
    config = parse(
        *["some/model", "--page-size", "16", "--mem-fraction-static", "0.5"],
        *["--disable-radix-cache", "--no-disable-cuda-graph", "--cuda-graph-bs", "1,2", "4"],
        *["--quantization", "int8", "--speculative-algorithm", "NGRAM"],
    )
    assert config.model.model == "some/model"
    assert config.memory.page_size == 16
    assert config.memory.mem_fraction_static == 0.5
    assert config.memory.disable_radix_cache
    assert config.graph.cuda_graph_bs == (1, 2, 4)
    assert config.model.quantization == "int8"
    assert config.spec.algorithm == "NGRAM"


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("page_size: 2\nport: 2\ncontext_length: 2\ndisable_radix_cache: true\n")
    monkeypatch.setenv("SPECENGINE_PAGE_SIZE", "4")
    monkeypatch.setenv("SPECENGINE_PORT", "4")
    config = parse("--config", str(file), "--page-size", "8", "--no-disable-radix-cache")
    assert config.memory.page_size == 8
    assert config.server.port == 4
    assert config.model.context_length == 2
    assert not config.memory.disable_radix_cache


def test_none_takes_back_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECENGINE_SPECULATIVE_ALGORITHM", "NGRAM")
    assert parse().spec.algorithm == "NGRAM"
    assert parse("--speculative-algorithm", "none").spec.algorithm is None


def test_sampling_flags() -> None:
    params = sample(
        *["--temperature", "0", "--stop", "a, b", "--stop", "c", "--stop-token-ids", "1", "2"],
        *["--logit-bias", "5=-1.5,6=2", "--max-tokens", "none", "--no-skip-special-tokens"],
        *["--n", "3", "--seed", "7"],
    )
    assert params == SamplingParams(
        temperature=0.0,
        stop=("a, b", "c"),
        stop_token_ids=(1, 2),
        logit_bias={5: -1.5, 6: 2.0},
        max_tokens=None,
        skip_special_tokens=False,
        n=3,
        seed=7,
    )
    assert sample() == SamplingParams()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["--logit-bias", "5"], "--logit-bias must be pairs ID=NUMBER"),
        (["--stop-token-ids", "x"], "--stop-token-ids must be a list"),
    ],
)
def test_sampling_flags_that_make_no_sense(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(*argv)
    with pytest.raises(RequestError, match="temperature"):
        sample("--temperature", "-1")


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--page-size", "32", "--print-config"])
    assert caught.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["page_size"] == 32


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--page-size", "3"], "error: --page-size 3: must be a power of two"),
        (["serve", "--port", "web"], "error: --port must be a whole number, got 'web'"),
        (["serve", "--config", "absent.yaml"], "error: cannot read --config absent.yaml"),
        (["generate", "--prompt-file", "absent.txt"], "error: cannot read --prompt-file"),
        (["generate", "--prompt", "x", "--n", "0"], "error: n must be a whole number"),
        (["generate", "m", "x", "--prompt", "y"], "error: the prompt is given twice, behind MODEL"),
        (["generate", "m", "--prompt-file", "y", "x"], "error: the prompt is given twice"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelLoadError("broken\nfile"), 1), (ConfigError("bad"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_forever(config: EngineConfig) -> None:
        raise error

    monkeypatch.setattr("specengine.cli.serve.serve_forever", serve_forever)
    assert main(["serve"]) == status


@pytest.mark.parametrize(
    "argv", [["serve", "--pagesize", "16"], ["serve", "--page", "1"], ["bake"]]
)
def test_unknown_flags_are_refused_and_not_guessed(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"specengine {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom specengine.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'pydantic', 'rich', 'yaml'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "--json", "--cache-dir", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2"]["weights"] == "real"
    assert not rows["smollm2"]["cached"]
    assert rows["tiny"]["cached"]
    assert rows["llama-3.1-8b-shape"]["weights"] == "random"
    assert rows["smollm2-135m-eagle3"]["target"] == "smollm2"
    assert rows["tiny-mtp"]["algorithm"] == "MTP"
    assert main(["models", "--cache-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "fetched at first use" in text
    assert "smollm2-135m-eagle3" in text
