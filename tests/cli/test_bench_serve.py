"""The command `specengine bench serve`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from specengine.cli.bench.serve import plan_of
from specengine.cli.main import build_parser, main
from specengine.lab.serving.loads import Load
from tests.support.canned_server import Canned, canned_server
from tests.support.live_server import live_server


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", "serve", *argv])


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    plan = plan_of(parse())
    assert plan.loads == (Load(1), Load(8), Load(64))
    assert (plan.server.root, plan.server.base) == ("http://127.0.0.1:8000", "/v1")
    assert plan.server.api_key == "from the environment"
    assert (plan.requests.send, plan.requests.ignore_eos) == ("ids", True)
    rates = plan_of(parse("--request-rate", "4", "inf", "--max-concurrency", "9"))
    assert rates.loads == (Load(9, 4.0), Load(9, float("inf")))
    both = plan_of(parse("--request-rate", "4", "--concurrency", "2", "--api-key", "k"))
    assert both.loads == (Load(2), Load(None, 4.0))
    assert both.server.api_key == "k"
    other = plan_of(parse("--base-url", "https://host:1/api/v2/", "--slo", "ttft=50,tpot=4"))
    assert (other.server.root, other.server.base) == ("https://host:1", "/api/v2")
    assert other.slo == {"ttft": 50.0, "tpot": 4.0}


def test_kinds_of_prompts(tmp_path: Path) -> None:
    chats, ids, texts = (tmp_path / f"{name}.jsonl" for name in ("chats", "ids", "texts"))
    chats.write_text('{"turns": ["Name a river.", "Another."]}\n')
    ids.write_text('{"prompt": [1, 2]}\n\n{"prompt": [3]}\n')
    texts.write_text('{"prompt": "Once"}\n')
    found = [plan_of(parse("--prompts", str(one))).requests for one in (chats, ids, texts)]
    assert [one.send for one in found] == ["chat", "ids", "text"]
    assert [one.ignore_eos for one in found] == [False, False, False]
    bodies = [json.loads(one.source("m", "load")()) for one in found]
    assert bodies[0]["messages"] == [{"role": "user", "content": "Name a river."}]
    assert bodies[1]["prompt"] in ([1, 2], [3])
    assert bodies[2]["prompt"] == "Once"
    asked = plan_of(parse("--prompts", str(texts), "--send", "chat")).requests
    body = json.loads(asked.source("m", "load")())
    assert body["messages"] == [{"role": "user", "content": "Once"}]
    assert "prompt" not in body
    chat = plan_of(parse("--send", "chat", "--prompt-len", "3", "--length-spread", "0.5")).requests
    said = json.loads(chat.source("m", "load")())["messages"][0]["content"]
    assert 1 <= len(said.split()) <= 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--concurrency", "0"], "--concurrency 0: must be at least 1"),
        (["--request-rate", "0"], "--request-rate: must be above 0"),
        (["--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
        (["--num-prompts", "4", "8"], "--num-prompts has 2 numbers for 3 points"),
        (["--max-concurrency", "2"], "goes with --request-rate"),
        (["--slo", "itl=3"], "--slo 'itl=3'"),
        (["--slo", "ttft=fast"], "--slo 'ttft=fast'"),
        (["--base-url", "localhost:8000"], "must begin with http"),
        (["--extra-body", "[1]"], "--extra-body must be an object"),
        (["--extra-body", "{"], "--extra-body is no JSON"),
        (["--length-spread", "1"], "--length-spread 1: must be in [0, 1)"),
        (["--percentiles", "101"], "--percentiles: each must lie"),
        (["--warmup", "-1"], "--warmup -1"),
        (["--prompts", "nowhere"], "there is no prompt set 'nowhere'"),
        (["--vocab-size", "1"], "--vocab-size 1"),
        (["--temperature", "-1"], "--temperature -1: must not be negative"),
    ],
)
def test_bad_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_prompts_that_do_not_fit_what_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, ids = tmp_path / "chats.jsonl", tmp_path / "ids.jsonl"
    chats.write_text('{"turns": ["Name a river."]}\n')
    ids.write_text('{"prompt": [1, "b"]}\n')
    assert main(["bench", "serve", "--prompts", str(chats), "--send", "ids"]) == 2
    assert main(["bench", "serve", "--prompts", str(ids)]) == 2
    ids.write_text('{"prompt": [1]}\n')
    assert main(["bench", "serve", "--prompts", str(ids), "--send", "chat"]) == 2
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "Once"}\n{"turns": ["Name a river."]}\n')
    assert main(["bench", "serve", "--prompts", str(mixed), "--send", "chat"]) == 2
    told = capsys.readouterr().err
    assert "--send chat: a prompt of the file is token ids" in told
    assert "mixed.jsonl:2 has no `prompt`, as the lines before have" in told
    assert "prompt sets are texts" in told
    assert "ids.jsonl:1: `prompt` is to be a text or a list of token ids" in told


def test_from_command_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with canned_server(Canned()) as url:
        command = ["bench", "serve", "--base-url", url, "--concurrency", "1", "2", "--label", "One"]
        more = ["--request-rate", "50", "--num-prompts", "3", "--out", str(tmp_path)]
        assert main([*command, *more, "--vocab-size", "9", "--prompt-len", "2"]) == 0
    (page,) = tmp_path.glob("*-serve.md")
    assert "# One serving canned" in page.read_text()
    assert "| 2 at once | TPOT |" in page.read_text()
    assert len(list(tmp_path.glob("*-serve.png"))) == 1
    assert "One serving canned" in capsys.readouterr().out


def test_failed_requests_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with canned_server(Canned(statuses=[429])) as url:
        command = ["bench", "serve", "--base-url", url, "--concurrency", "1", "--num-prompts", "2"]
        assert main([*command, "--warmup", "0"]) == 1
    assert "429" in capsys.readouterr().out


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = {"model": "tiny", "device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
    flags |= {"speculative_algorithm": "EAGLE3", "speculative_adaptive": False}
    with live_server(flags, None) as server:
        yield server.url


@pytest.mark.parametrize("send", ["ids", "text", "chat"])
def test_against_the_real_server(url: str, send: str, tmp_path: Path) -> None:
    """With drafts: the server tells how many stood."""
    file = tmp_path / "found.json"
    command = ["bench", "serve", "--base-url", url, "--concurrency", "2", "--send", send]
    more = ["--num-prompts", "3", "--prompt-len", "6", "--output-len", "9", "--json", str(file)]
    assert main([*command, *more, "--vocab-size", "200"]) == 0
    (point,) = json.loads(file.read_text())["points"]
    assert (point["num_finished"], point["output_tokens"]) == (3, 27)
    assert point["prompt_tokens"] >= 18
    assert point["tau"] > 1
    assert point["is_counted"]
