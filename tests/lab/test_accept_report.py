"""What is shown and written of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specengine.core.errors import ConfigError
from specengine.lab.accept.bootstrap import Estimate, draw_prompts
from specengine.lab.accept.markdown import markdown
from specengine.lab.accept.output import Output
from specengine.lab.accept.report import Report, RunResult, SettingResult
from specengine.lab.accept.sheet import Sheet, interval, percent
from specengine.lab.accept.sheets import sheets
from specengine.lab.accept.speed import Speed
from specengine.lab.accept.statistics import Sample
from specengine.lab.accept.summary import Difference, PromptLabels, Summary, summarise
from tests.lab.rounds_by_hand import Round, table

NAN = float("nan")


def summary() -> Summary:
    """Three prompts in two sets: τ is 2, 2 and 3; the draft knows all tokens but 9."""
    rounds = [
        Round(0, 1, [1, 2], 1, goes_on=False, context=100, nodes=[(0.9, True)]),
        Round(1, 1, [1, 9], 3, goes_on=True, context=200, nodes=[(0.6, True), (0.2, False)]),
        Round(2, 1, [1, 2, 3], 2, goes_on=False, context=200, entropy=[0.1, 0.2, 0.3]),
    ]
    one = table(rounds, final=[3, 3, 4])
    set_of = np.array([0, 0, 1])
    sample = Sample(one, np.array([0, 1, 2]), draw_prompts(set_of, 100, seed=0))
    labels = PromptLabels(
        set_of, np.array([0, 1, 2]), ["talk", "sums"], ["talk/a", "talk/b", "sums"]
    )
    known = np.arange(10) != 9
    return summarise(sample, np.array([0, 1, 0]), labels, known)


def report(**changes: Any) -> Report:
    run = RunResult(0.0, "chain", 3, 3, 1.5, ("prompt 7, turn 1: too long",), summary())
    good = SettingResult(
        "chain",
        {"algorithm": "EAGLE3", "num_steps": 3},
        draft={"path": "drafts/a", "weights_sha256": "f00"},
        draft_vocabulary=9,
        runs=[run],
        speed=Speed(1, 8, 100, 2.5, (150.0, 130.0, 160.0), (100.0, 100.0, 100.0)),
    )
    bad = SettingResult("bad | worse", {}, error="no [draft] there")
    values: dict[str, Any] = {
        "date": "2026-11-21",
        "environment": {
            **{"command": "specengine bench accept", "commit": "abc", "cpu": "some CPU"},
            **{"cores": 2, "threads": 1, "gpu": None, "python": "3.11"},
            "versions": {"torch": "2.13", "triton": None},
        },
        "target": {
            **{"name": "tiny", "weights_sha256": "aa", "dtype": "float32", "quantization": None},
            **{"device": "cpu", "tokenizer_sha256": "bb", "chat_template_sha256": None},
        },
        "data": [
            {"name": "talk", "source": "talk.jsonl", "sha256": "cc", "prompts": 2, "available": 5}
        ],
        "protocol": {
            **{"temperatures": [0.0], "max_new_tokens": 8, "batch_size": 2, "seed": 0},
            "chat_template": True,
        },
        "settings": [good, bad],
        "differences": [Difference("tree", "chain", 0.0, "all", Estimate(0.5, 0.25, 0.75, 9, 3))],
    }
    return Report(**(values | changes))


def cells(one: Sheet, row: int = 0) -> dict[str, str]:
    return dict(zip(one.columns, one.rows[row], strict=True))


def test_every_table_is_there_and_square() -> None:
    found = {one.title: one for one in sheets(report())}
    assert list(found) == [
        "Accepted length τ",
        "Differences, paired",
        "Conditional acceptance by position",
        "Joint acceptance by position",
        "Tokens that a round emits",
        "Why rounds emitted no more",
        "τ by category",
        "τ by turn",
        "τ by context length",
        "τ by target entropy",
        "Acceptance by target entropy",
        "Calibration of the draft's confidence",
        "Speed",
        "Not measured",
    ]
    for one in found.values():
        assert all(len(row) == len(one.columns) for row in one.rows), one.title
    tau = cells(found["Accepted length τ"])
    assert (tau["talk"], tau["sums"]) == ("2.00 [2.00, 2.00]", "3.00")
    assert tau["all"].startswith("2.33 [")
    assert (tau["prompts"], tau["rounds"], tau["same answers"]) == ("3", "3", "3/3")
    assert "bonus token included" in found["Accepted length τ"].note
    why = cells(found["Why rounds emitted no more"])
    assert (why["vocabulary miss"], why["draft used up"]) == ("33.3%", "66.7%")
    assert (why["draft vocabulary"], why["emitted outside it"]) == ("9 tokens", "14.29%")
    pair = cells(found["Differences, paired"])
    assert (pair["Δτ"], pair["clear"]) == ("+0.50 [+0.25, +0.75]", "yes")
    assert found["Not measured"].rows == [["bad | worse", "no [draft] there"]]


def test_speed_of_a_cpu_is_a_ratio_and_that_of_a_gpu_a_rate() -> None:
    on_cpu = next(one for one in sheets(report()) if one.title == "Speed")
    assert cells(on_cpu)["speed / plain"] == "1.50×"
    assert cells(on_cpu)["range"] == "1.30 to 1.60"
    assert not any("tok/s" in column for column in on_cpu.columns)
    target = report().target | {"device": "cuda"}
    on_gpu = next(one for one in sheets(report(target=target)) if one.title == "Speed")
    assert (cells(on_gpu)["tok/s, best"], cells(on_gpu)["plain tok/s, best"]) == ("160", "100")


def test_several_temperatures_are_told_apart() -> None:
    protocol = report().protocol | {"temperatures": [0.0, 1.0]}
    found = next(sheets(report(protocol=protocol)))
    assert found.rows[0][0] == "chain, T=0"


def test_markdown_says_how_it_was_made() -> None:
    page = markdown(report(), {"A plot": "a.png"})
    for wanted in (
        "# Acceptance on tiny: talk",
        "    specengine bench accept\n",
        "commit abc, some CPU (2 cores, 1 threads), Python 3.11, torch 2.13.",
        "weights aa, its tokenizer bb, its chat template None",
        "| bad \\| worse | no [draft] there |",
        "![A plot](a.png)",
        "- **chain**: `algorithm=EAGLE3 num_steps=3`; path drafts/a, weights_sha256 f00",
        "- talk: 2 of 5 prompts, talk.jsonl, SHA-256 cc",
        "- left out by chain: prompt 7, turn 1: too long",
    ):
        assert wanted in page, wanted


def test_json_has_no_nan() -> None:
    text = report().to_json()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    groups = found["settings"][0]["runs"][0]["summary"]["by_set"]
    assert groups[1]["tau"] == {"value": 3.0, "low": None, "high": None, "count": 1, "prompts": 1}
    assert found["definitions"]["tau"].startswith("τ, the accepted length")


def test_numbers() -> None:
    assert interval(Estimate(NAN, NAN, NAN, 0, 0)) == "–"
    assert interval(Estimate(1.234, NAN, NAN, 5, 1)) == "1.23"
    assert interval(Estimate(0.5, -0.25, 1.0, 5, 3), sign="+") == "+0.50 [-0.25, +1.00]"
    assert percent(Estimate(0.123, 0.1, 0.2, 5, 3)) == "12.3% [10, 20]"
    assert not Difference("a", "b", 0.0, "all", Estimate(0.1, -0.1, 0.3, 5, 3)).is_clear
    assert not Difference("a", "b", 0.0, "all", Estimate(0.1, NAN, NAN, 5, 1)).is_clear


def test_files(tmp_path: Path) -> None:
    output = Output(tmp_path / "deep" / "all.json", tmp_path / "out", "accept")
    output.check()
    output.write(report())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["2026-11-21-accept.json"]
    written = output.finish(report())
    names = [path.name for path in written]
    plots = ["tau", "positions", "histogram", "context", "entropy", "reliability"]
    assert names == [
        "all.json",
        "2026-11-21-accept.json",
        "2026-11-21-accept.md",
        *(f"2026-11-21-accept-{name}.png" for name in plots),
    ]
    for path in written:
        assert path.stat().st_size > 0
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.name in written[2].read_text()


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    failed = report(settings=[report().settings[1]], differences=[])
    written = Output(None, tmp_path, "none").finish(failed)
    assert [path.suffix for path in written] == [".json", ".md"]


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        Output(tmp_path / "file" / "x.json", None, "x").write(report())
    monkeypatch.setattr("specengine.lab.accept.plots.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib, .* pip install 'specengine\[bench\]'"):
        Output(None, tmp_path, "x").check()
    Output(tmp_path / "x.json", None, "x").check()
