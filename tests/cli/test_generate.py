"""`generate` and `demo` on a small random model."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine.cli.demo import contenders
from specengine.cli.main import main
from specengine.core.config import EngineConfig, ModelConfig, SpecConfig

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--max-total-tokens", "1024"]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The commands set the root logger up for a process of their own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def model(small_models: dict[str, Path]) -> str:
    return str(small_models["llama"])


def generate(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["generate", *argv, "--json", *GREEDY]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_text_is_that_of_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "--prompt", "abcabc", *GREEDY]) == 0
    text = capsys.readouterr().out
    result = generate(capsys, model, "--prompt", "abcabc")
    assert text == result["choices"][0]["text"] + "\n"
    assert result["completion_tokens"] == len(result["choices"][0]["token_ids"]) == 12
    assert result["choices"][0]["finish_reason"] == "length"


def test_sources_and_forms_of_a_prompt(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("abcabc")
    monkeypatch.setattr("sys.stdin", io.StringIO("abcabc"))
    raw = generate(capsys, model, "--prompt", "abcabc", "--raw")
    assert raw["prompt_tokens"] == 6
    chat = generate(capsys, model, "--prompt-file", str(file), "--chat")
    assert chat["prompt_tokens"] == len("[user] abcabc\n[assistant] ")
    assert generate(capsys, model)["choices"] == chat["choices"]  # stdin, and chat by default
    assert generate(capsys, model, "abcabc", "--raw")["choices"] == raw["choices"]
    assert generate(capsys, model, "--raw", "abcabc")["choices"] == raw["choices"]


def test_a_prompt_behind_the_flags_is_the_prompt(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, *GREEDY, "--json", "--raw", "abcabc"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 6


def test_choices_logprobs_and_speculation(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    ngram = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match", "1"]
    prompt = ["--prompt", "abcabcabcabc", "--raw"]
    options = ["--n", "2", "--logprobs", "1", *ngram]
    result = generate(capsys, model, *prompt, *options)
    plain = generate(capsys, model, *prompt)
    assert [choice["index"] for choice in result["choices"]] == [0, 1]
    for choice in result["choices"]:
        assert choice["text"] == plain["choices"][0]["text"]
        assert len(choice["logprobs"]) == 12
        spec = choice["metrics"]["speculative_decoding"]
        assert spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] == 11
        assert spec["num_draft_tokens"] > 0
        assert sum(spec["depth_histogram"]) == spec["num_spec_steps"]
        assert spec["depth"]["reason"].startswith("batch ")
        assert f"K={spec['depth']['num_steps']}" in spec["depth"]["reason"]
    spec = plain["choices"][0]["metrics"]["speculative_decoding"]
    assert spec["mean_acceptance_length"] == 1.0
    assert spec["depth_histogram"] == [11]


def test_the_log_says_how_deep_drafts_were_to_go(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ngram = ["--speculative-algorithm", "NGRAM", "--no-speculative-adaptive"]
    for options, says in ((ngram, True), ([], False)):
        argv = ["--prompt", "abcabcabcabc", "--raw", *options]
        assert main(["generate", model, *argv, *GREEDY]) == 0
        line = " at K=7; last K=7, fixed by --no-speculative-adaptive"
        log = capsys.readouterr().err
        assert (line in log) is says
        assert ("depth of drafts: rounds: " in log) is says


def test_lossy_rules_say_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match", "1"]
    for rule, lossy in (("relaxed", True), ("match", False)):
        argv = ["--prompt", "abcabcabcabc", "--raw", *flags, "--speculative-verify", rule]
        assert main(["generate", model, *argv, *GREEDY]) == 0
        log = capsys.readouterr().err
        assert ("--speculative-verify relaxed is lossy" in log) is lossy
        assert ("LOSSY" in log) is lossy
        found = generate(capsys, model, *argv)
        assert found["choices"][0]["metrics"]["speculative_decoding"]["lossy"] is lossy


def test_no_prompt(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["generate", model]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no-such-model", "--prompt", "x"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: there is no model 'no-such-model'")


def test_demo(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.cli.demo.PROMPTS", {"letters": "abcabcabcabc"})
    argv = ["demo", model, "--max-tokens", "8", "--max-total-tokens", "1024"]
    assert main([*argv, "--speculative-ngram-min-match", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("http://127.0.0.1:") == 2
    assert "letters: no speculation" in out
    assert "letters: NGRAM" in out
    assert "yes" in out
    assert "NO" not in out.replace("NGRAM", "")


def test_the_demo_that_needs_no_download(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.cli.demo.PROMPTS", {"one": "What is gravity?"})
    assert main(["demo", "tiny", "--max-tokens", "12", "--max-total-tokens", "512"]) == 0
    out = capsys.readouterr().out
    assert out.count("http://127.0.0.1:") == 3
    assert "one: EAGLE3" in out


def test_contenders_of_the_demo() -> None:
    def algorithms(model: str, **spec: Any) -> list[str | None]:
        config = EngineConfig(model=ModelConfig(model=model), spec=SpecConfig(**spec))
        return [one.algorithm for one in contenders(config)]

    assert algorithms("smollm2") == ["EAGLE3", "NGRAM"]
    assert algorithms("tiny") == ["EAGLE3", "NGRAM"]
    assert algorithms("another") == ["NGRAM"]
    assert algorithms("smollm2", algorithm="SUFFIX") == ["SUFFIX"]
    assert algorithms("smollm2", ngram_branches=2) == ["NGRAM"]


def test_what_rounds_cost_is_kept(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And refused, by name, by another engine."""
    path = tmp_path / "costs.json"
    draft = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match", "1"]
    draft += ["--speculative-cost-table", str(path), "--prompt", "abcabcabcabc", "--device", "cpu"]
    long = ["generate", model, *draft, *GREEDY, "--max-tokens", "60"]
    assert main(long) == 0
    first = capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["measured_for"]["dtype"] == "float32"
    assert kept["seconds"].keys() == {"1"}
    assert main(long) == 0
    assert capsys.readouterr().out == first
    assert main([*long, "--dtype", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert "dtype was 'float32' and is 'bfloat16'" in error
    assert "delete the file" in error
    elsewhere = str(tmp_path / "none" / "costs.json")
    assert main([*long, "--speculative-cost-table", elsewhere]) == 2
    assert "name one in a folder that can be written" in capsys.readouterr().err
