"""The serving bench's clients, against a server whose every byte is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import uvloop

from specengine.core.errors import SpecEngineError
from specengine.lab.serving.client import Client
from specengine.lab.serving.fleet import Tell, run_clients
from specengine.lab.serving.loads import Load, deal
from specengine.lab.serving.measures import Point, measure, read_slo
from specengine.lab.serving.prompts import Requests
from specengine.lab.serving.records import Ask, ClientJob, ClientReport, Outcome
from specengine.lab.serving.report import Report
from specengine.lab.serving.run import Plan, ServingBench
from specengine.lab.serving.sheets import sheets
from specengine.lab.serving.told import Server
from tests.support.canned_server import Canned, canned_server, delta, text, usage
from tests.support.waiting import until

ASKED = Requests(prompt_len=5, output_len=4, vocab_size=50)


def bench(canned: Canned, *loads: Load, requests: Requests = ASKED, **more: Any) -> Report:
    with canned_server(canned) as url:
        options = {"num_requests": (4,), "num_warmup": 0, "has_details": True, **more}
        plan = Plan(Server.at(url, None), loads or (Load(2),), requests, **options)
        return ServingBench(plan, lambda report: None).run()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single client runs in a thread of this process, which starts sooner."""

    def run_here(jobs: list[ClientJob], tell: Tell) -> list[ClientReport]:
        if len(jobs) > 1:
            return run_clients(jobs, tell)
        return [uvloop.run(Client(jobs[0], perf_counter()).run())]

    monkeypatch.setattr("specengine.lab.serving.run.run_clients", run_here)


def only_point(canned: Canned, *loads: Load, **more: Any) -> Point:
    (point,) = bench(canned, *loads, **more).points
    return point


def test_times_are_those_of_the_events() -> None:
    canned = Canned(gap=0.05)
    point = only_point(canned, slo={"e2e": 1e6})
    assert (point.num_finished, point.errors) == (4, {})
    assert (point.prompt_tokens, point.output_tokens) == (20, 16)
    found = {name: one.mean for name, one in point.latencies.items()}
    assert found["e2e"] >= 150  # three gaps
    assert found["tpot"] == pytest.approx(found["itl"])  # three gaps, three tokens after the first
    assert found["e2e"] == pytest.approx(found["ttft"] + 3 * found["tpot"])
    assert point.latencies["itl"].count == 12
    assert point.goodput == point.request_rate
    assert point.tau is None


def test_goodput_counts_those_that_keep_every_bound() -> None:
    point = only_point(Canned(gap=0.02), slo={"e2e": 1})
    assert (point.goodput, point.num_finished) == (0, 4)


@pytest.mark.parametrize(
    "canned",
    [
        Canned(piece=1),
        Canned(piece=7),
        Canned(ends="\r\n\r\n", piece=3),
        Canned(closes=True),
        Canned(closes=True, piece=5),
        Canned(
            events=[text('a\\n\\ndata: {"x"', token_ids=[1, 2]), text("é\n\ndata: [DONE]"), usage()]
        ),
    ],
    ids=["bytes", "pieces", "crlf", "closed", "closed in pieces", "text like events"],
)
def test_an_answer_is_read_however_it_is_cut(canned: Canned) -> None:
    point = only_point(canned)
    assert (point.num_finished, point.output_tokens, point.errors) == (4, 16, {})


def test_connections_are_used_again() -> None:
    canned = Canned()
    bench(canned, Load(2), num_requests=(10,))
    assert (len(canned.bodies), canned.num_connections) == (10, 2 + 3)  # models, metrics twice


def test_roles_and_ends_are_no_tokens() -> None:
    events = [
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content=""),  # a token whose text waits
        delta(content="a"),
        delta("stop"),
    ]
    canned = Canned(events=events, gap=0.05)
    report = bench(canned, requests=replace(ASKED, send="chat"))
    (point,) = report.points
    assert point.latencies["ttft"].mean >= 50
    assert (point.output_tokens, point.is_counted) == (12, False)
    assert "events were counted" in next(sheets(report)).note
    assert canned.bodies[0]["messages"][0]["role"] == "user"
    assert canned.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")


def test_tokens_are_counted_by_their_ids_without_usage() -> None:
    point = only_point(
        Canned(events=[text("a", token_ids=[1, 2]), text("", "length", token_ids=[3])])
    )
    assert (point.output_tokens, point.is_counted) == (12, True)


def test_failures_are_counted_by_what_they_are() -> None:
    canned = Canned(statuses=[503, 429, 503])
    report = bench(canned)
    (point,) = report.points
    assert (point.num_finished, point.errors) == (1, {"503": 2, "429": 1})
    assert "no room" in point.samples["503"]
    assert [sheet.title for sheet in sheets(report)] == ["Rates", "Latencies", "Failures"]
    assert report.num_failed == 3


@pytest.mark.parametrize(
    ("canned", "error"),
    [
        (Canned(cuts=True, is_done=False), "cut off"),
        (Canned(is_done=False), "cut off"),
        (Canned(events=[text("a"), {"error": {"message": "gone"}}]), "in stream"),
        (Canned(events=[usage()]), "empty"),
        (Canned(gap=0.4), "timeout"),
    ],
)
def test_answers_that_do_not_end_well(canned: Canned, error: str) -> None:
    point = only_point(canned, timeout=0.3 if error == "timeout" else 60)
    assert (point.num_finished, point.errors) == (0, {error: 4})


def test_a_closed_loop_keeps_its_concurrency_over_clients() -> None:
    canned = Canned(meets=5)
    report = bench(canned, Load(5), num_requests=(20,), num_clients=2)
    assert canned.most_running == 5
    assert (report.points[0].num_clients, report.points[0].num_finished) == (2, 20)
    assert [one["number"] for one in report.details[0]] == list(range(20))


def test_a_rate_sends_at_the_times_that_it_drew() -> None:
    """None sooner, and none later unless the machine is busy, which it is not every time."""
    load = Load(None, 40.0)
    drawn = [one.due for one in load.asks(lambda: b"", 20, ASKED.seed)]
    assert 0.2 < drawn[-1] < 1.0

    def are_in_time() -> bool:
        canned = Canned()
        report = bench(canned, load, num_requests=(20,), num_clients=1)
        assert report.points[0].num_finished == 20
        sent = [one["sent"] - report.details[0][0]["due"] for one in report.details[0]]
        assert all(at > due - 0.002 for at, due in zip(sent, drawn, strict=True))
        came = [one - canned.times[0] for one in canned.times]
        return max(abs(a - b) for a, b in zip(came, drawn, strict=True)) < 0.1

    until(are_in_time)


def test_a_rate_may_be_bounded() -> None:
    canned = Canned(meets=3, gap=0.01)
    only_point(canned, Load(3, float("inf")), num_requests=(12,))
    assert canned.most_running == 3


def test_requests_that_are_random_differ_and_come_again_with_the_seed() -> None:
    first, again, other = Canned(), Canned(), Canned()
    bench(first, Load(1), Load(2))
    bench(again, Load(1), Load(2))
    bench(other, Load(1), requests=replace(ASKED, seed=1))
    prompts = [tuple(one["prompt"]) for one in first.bodies]
    assert len(set(prompts)) == 8
    assert sorted(prompts) == sorted(tuple(one["prompt"]) for one in again.bodies)
    assert not set(prompts) & {tuple(one["prompt"]) for one in other.bodies}
    assert all(len(one) == 5 and set(one) <= set(range(1, 50)) for one in prompts)


def test_what_a_request_asks_for() -> None:
    canned = Canned()
    asked = replace(ASKED, extra={"top_k": 3, "temperature": 0.5})
    bench(canned, requests=asked, num_requests=(1,), model="m")
    body = canned.bodies[0]
    del body["prompt"]
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "temperature": 0.5,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_each_load_has_its_own_number_of_requests() -> None:
    loads = (Load(1), Load(2), Load(None, float("inf")))
    points = bench(Canned(), *loads, num_requests=(2, 5, 3)).points
    assert [one.num_finished for one in points] == [2, 5, 3]
    points = bench(Canned(), *loads[:2], num_requests=()).points
    assert [one.num_finished for one in points] == [8, 8]


def test_warm_up_is_not_counted() -> None:
    canned = Canned()
    point = only_point(canned, Load(3), num_warmup=None)
    assert (point.num_requests, len(canned.bodies)) == (4, 7)


def test_a_server_that_refuses_the_warm_up_ends_the_bench() -> None:
    with pytest.raises(
        SpecEngineError, match=r"answers none of 2 requests that warm up: 400: .*no room"
    ):
        bench(Canned(statuses=[400, 400]), num_warmup=2)


def test_no_server_is_told() -> None:
    plan = Plan(Server.at("http://127.0.0.1:9", None), (Load(1),), ASKED)
    with pytest.raises(SpecEngineError, match="is a server there"):
        ServingBench(plan, lambda report: None)


def test_accepted_length_by_usage_and_by_counters() -> None:
    told = {"speculative_decoding": {"num_spec_steps": 2, "num_accepted_draft_tokens": 3}}
    ours = Canned(events=[*map(text, "abcd"), usage(metrics=told)])
    assert only_point(ours).tau == 2.5
    name = 'vllm:spec_decode_num_{}_total{{engine="0"}} {}'
    calls = [(10, 4), (30, 34)]
    pages = [
        "\n".join([name.format("drafts", a), name.format("accepted_tokens", b)]) for a, b in calls
    ]
    assert only_point(Canned(metrics=pages)).tau == 2.5


def test_api_key_is_sent() -> None:
    canned = Canned()
    with canned_server(canned) as url:
        plan = Plan(
            Server.at(url + "/v1/", "secret"), (Load(1),), ASKED, num_requests=(1,), num_warmup=0
        )
        ServingBench(plan, lambda report: None).run()
    assert "\r\nAuthorization: Bearer secret\r\n" in canned.heads[0]


def test_definitions_of_the_measures() -> None:
    """By hand: 3 tokens in two events, and one of a single token, which has no TPOT."""
    outcomes = [
        Outcome(0, 0.0, 1.0, 1.1, 1.5, [0.4], 10, 3),
        Outcome(1, 0.0, 1.0, 1.2, 1.2, [], 10, 1),
        Outcome(2, 0.0, 1.0, error="503", message="full"),
    ]
    reports = [ClientReport(outcomes, 5, 0.5, 2.0)]
    point = measure(Load(3), reports, read_slo("ttft=150,tpot=200"), (50,))
    assert point.latencies["ttft"].mean == pytest.approx(150)
    assert point.latencies["tpot"].mean == pytest.approx(200)
    assert (point.latencies["tpot"].count, point.latencies["itl"].count) == (1, 1)
    assert point.latencies["e2e"].percentiles == {"50": pytest.approx(350)}
    assert (point.output_rate, point.prompt_rate, point.request_rate) == (2.0, 10.0, 1.0)
    assert point.goodput == 0.5
    assert (point.client_busy, point.client_us_per_event) == (0.25, 1e5)


def test_requests_are_dealt_in_proportion() -> None:
    asks = [Ask(number, b"") for number in range(10)]
    hands = deal(asks, [3, 2])
    assert [len(hand) for hand in hands] == [6, 4]
    assert sorted(one.number for hand in hands for one in hand) == list(range(10))


@pytest.mark.parametrize(
    ("load", "asked", "count", "expected"),
    [(Load(8), None, 32, 1), (Load(8), 3, 32, 3), (Load(2), 3, 32, 2), (Load(8), 9, 4, 4)],
)
def test_client_processes(load: Load, asked: int | None, count: int, expected: int) -> None:
    assert load.num_clients(asked, count) == expected
    shares = [load.share(number, expected, count) for number in range(expected)]
    assert sum(shares) == load.concurrency
    assert min(shares) >= 1


def test_json_of_a_report(tmp_path: Path) -> None:
    report = bench(Canned(statuses=[500]), Load(2), Load(None, 50.0))
    found = json.loads(report.to_json())
    assert [one["name"] for one in found["points"]] == ["2 at once", "50 a second"]
    assert found["points"][0]["errors"] == {"500": 1}
    assert found["model"] == "canned"
    assert len(found["details"][0]) == 4
