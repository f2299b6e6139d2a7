"""What the policy of split prompts decides on recorded histories of rounds and calls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specengine.scheduler.split_policy import (
    PROMPT_RATIO,
    PromptQueue,
    SplitDecision,
    SplitPrefillPolicy,
)

SHARES = (0.5, 0.65, 0.8)
QUEUE = PromptQueue(num_tokens=8000, layers_left=32)
CROWD = PromptQueue(num_tokens=8000, layers_left=32, num_waiting_tokens=9000)


@dataclass
class Device:
    """A history of one: seconds of a round alone, and of a layer of a prompt alone; by which part
    of their share prompts slow rounds down."""

    round: float = 0.010
    layer: float = 0.006
    harm: float = 0.5

    def layer_on(self, share: float | None) -> float:
        return self.layer if share is None else self.layer / share

    def play(self, policy: SplitPrefillPolicy, queue: PromptQueue, steps: int) -> SplitDecision:
        """Rounds of 32 requests, a prompt always beside them."""
        for _ in range(8):
            policy.saw_round(32, self.round, None)
        decision = policy.decide(queue, 32)
        for _ in range(steps):
            seconds = self.layer_on(decision.share) * decision.layers
            policy.saw_layers(decision, queue.num_tokens, seconds)
            if decision.share is not None:
                policy.saw_round(32, self.round * (1 + self.harm * decision.share), decision)
            decision = policy.decide(queue, 32)
        return decision


def test_without_rounds_all_layers_run_on_the_whole_device() -> None:
    policy = SplitPrefillPolicy(32, SHARES)
    assert policy.decide(QUEUE, 0) == SplitDecision(32, None, "no round runs")


@pytest.mark.parametrize("shares", [(), SHARES])
def test_what_was_never_measured_begins_small(shares: tuple[float, ...]) -> None:
    decision = SplitPrefillPolicy(32, shares).decide(QUEUE, 32)
    assert decision.layers == (4 if shares else 1)


@dataclass
class Traffic:
    """Prompts of 32 layers every so many seconds (0: without end), on a device whose rounds never
    stop. A second of a call on a share does `share` of the whole device's work."""

    every: float
    device: Device
    shares: tuple[float, ...] = ()
    ratio: float = 1.5

    def run(self, seconds: float) -> tuple[float, float]:
        """How many times as long tokens took, over the second half; and prompts, at worst."""
        policy = SplitPrefillPolicy(32, self.shares, self.ratio)
        now, left, arrived, came = 0.0, 0, 0.0, 0
        rounds, since, worst = 0, 0.0, 0.0
        while now < seconds:
            if now < seconds / 2:
                rounds, since, worst = 0, now, 0.0
            if not left and now >= came * self.every + 0.2:
                left, arrived, came = 32, now, came + 1
            call, delay, slowdown = None, 0.0, 1.0
            if left:
                call = policy.decide(PromptQueue(8000, left), 32)
                took = call.layers * self.device.layer_on(call.share)
                policy.saw_layers(call, 8000, took)
                left -= call.layers
                if call.share is None:
                    delay, call = took, None
                else:
                    slowdown = 1 + self.device.harm * call.share
            lasted = self.device.round * slowdown
            policy.saw_round(32, lasted, call, delay)
            now, rounds = now + lasted + delay, rounds + 1
            if not left and arrived:
                worst, arrived = max(worst, now - arrived), 0.0
        return (now - since) / rounds / self.device.round, worst / (32 * self.device.layer)


@pytest.mark.parametrize("every", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("round_seconds", [0.002, 0.010, 0.030])
def test_in_turns_tokens_keep_to_the_ratio(every: float, round_seconds: float) -> None:
    device = Device(round=round_seconds, layer=0.0008)  # a layer is less than a round may wait
    slower, _ = Traffic(every, device).run(30.0)
    assert slower <= 1.5
    assert slower > 1.35 or every, "what rounds bear is given to prompts"


def test_in_turns_a_prompt_now_and_then_is_given_much() -> None:
    _, rare = Traffic(2.0, Device(layer=0.004)).run(20.0)
    _, endless = Traffic(0.0, Device(layer=0.004)).run(20.0)
    assert rare < 1.7  # a call may last 3 rounds
    assert endless > 3.0  # at most a third of the time is theirs


def test_first_measurements_of_a_share_do_not_count() -> None:
    """They allocate memory. On an H100 they said 10 times, and no later one ever did."""
    policy = SplitPrefillPolicy(32, (0.5, 0.76))
    call = SplitDecision(4, 0.76, "")
    for _ in range(8):
        policy.saw_round(32, 0.0077)
    for _ in range(2):
        policy.saw_layers(call, 8000, 4 * 0.037)
        policy.saw_round(32, 0.077, call)
    assert policy.slowdown(0.76) < 1.5
    policy.saw_round(32, 0.0154, call)
    assert policy.slowdown(0.76) == pytest.approx(2.0)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    policy = SplitPrefillPolicy(32, (0.5, 0.76))
    large, small = SplitDecision(4, 0.76, ""), SplitDecision(4, 0.5, "")
    policy.saw_round(32, 0.0077)
    for _ in range(6):
        policy.saw_round(32, 0.077, large)
    assert policy.slowdown(0.76) > 8
    for _ in range(1100):
        policy.saw_round(32, 0.0107, small)
    assert policy.slowdown(0.76) == pytest.approx(1 + 0.39 * 0.76 / 0.5, rel=0.01)


def test_where_answers_are_short_a_prompt_is_given_less() -> None:
    policy, device = SplitPrefillPolicy(32), Device(layer=0.004)
    counts = []
    for seconds in (8.0, 1.0, 0.1):
        for _ in range(30):
            policy.saw_answer(seconds)
        for _ in range(400):
            policy.saw_round(32, device.round)
        counts.append(device.play(policy, QUEUE, 30).layers)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 7  # three rounds
    assert counts[-1] == 1  # what every round bears


def test_on_an_h100_a_prompt_a_second_has_the_large_share_and_tokens_keep_to_the_ratio() -> None:
    """As if what a share takes from rounds and what it gives to prompts added up to the device."""
    device = Device(round=0.0077, layer=0.0065, harm=2.0)  # 2.5 times on 0.76
    slower, prompt = Traffic(1.0, device, (0.5, 0.76)).run(20.0)
    assert slower <= 1.5
    assert prompt <= 1.5


def test_on_shares_tokens_keep_to_the_ratio() -> None:
    harmful = Device(harm=1.5)  # rounds of 1.75 and 1.98 times
    slower, prompt = Traffic(1.0, harmful, (0.5, 0.65)).run(20.0)
    assert slower <= 1.5
    assert prompt <= 1 / 0.65 + 0.1  # the largest share serves it
    slower, _ = Traffic(0.0, Device(harm=0.6), (0.3, 0.5, 0.65)).run(20.0)
    assert slower <= 1.5


def test_in_turns_no_call_delays_a_round_by_more_than_three() -> None:
    policy = SplitPrefillPolicy(32, tpot_ratio=20.0)
    assert Device(layer=0.001).play(policy, QUEUE, 20).layers == 30


def test_in_turns_longer_prompts_have_fewer_layers_a_call() -> None:
    policy = SplitPrefillPolicy(32)
    Device(layer=0.0005).play(policy, QUEUE, 20)
    counts = [policy.decide(PromptQueue(n, 32), 32).layers for n in (2000, 16000, 64000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 32
    assert counts[-1] < 8


@pytest.mark.parametrize(("harm", "share"), [(0.1, 0.8), (0.6, 0.65), (0.8, 0.5), (4.0, 0.5)])
def test_where_prompts_wait_the_share_is_the_largest_that_rounds_bear(
    harm: float, share: float
) -> None:
    decision = Device(harm=harm).play(SplitPrefillPolicy(32, SHARES), CROWD, 60)
    assert decision.share == share
    policy = SplitPrefillPolicy(32, SHARES, tpot_ratio=10.0)
    assert Device(harm=harm).play(policy, CROWD, 60).share == 0.8


def test_where_none_waits_the_share_is_the_smallest_that_serves_the_prompt() -> None:
    """1 / 0.8 of the time alone is below PROMPT_RATIO, 1 / 0.65 is not; measured ones go before."""
    assert 1 / 0.8 < PROMPT_RATIO < 1 / 0.65
    policy = SplitPrefillPolicy(32, SHARES)
    assert Device(harm=0.1).play(policy, QUEUE, 20).share == 0.8
    policy.saw_layers(SplitDecision(32, None, ""), 8000, 32 * 0.012)  # alone it is no faster
    for _ in range(3):  # two do not count
        policy.saw_layers(SplitDecision(4, 0.5, ""), 8000, 4 * 0.013)
    assert policy.decide(QUEUE, 32).share == 0.5
    assert policy.decide(CROWD, 32).share == 0.8


def test_a_call_lasts_as_long_as_a_round_beside_it() -> None:
    policy = SplitPrefillPolicy(32, SHARES)
    device = Device(round=0.020, layer=0.004, harm=0.25)
    decision = device.play(policy, CROWD, 40)
    seconds = decision.layers * device.layer_on(decision.share)
    beside = 0.020 * (1 + 0.25 * 0.8)
    assert decision.share == 0.8
    assert beside <= seconds < beside + device.layer_on(decision.share)


def test_rounds_that_become_slower_beside_prompts_take_their_share_back() -> None:
    policy = SplitPrefillPolicy(32, SHARES)
    assert Device(harm=0.1).play(policy, CROWD, 40).share == 0.8
    assert Device(harm=2.0).play(policy, CROWD, 40).share == 0.5


def test_costs_of_rounds_are_kept_by_batch_size() -> None:
    policy = SplitPrefillPolicy(32)
    for _ in range(5):
        policy.saw_round(1, 0.002, None)
        policy.saw_round(64, 0.030, None)
    policy.saw_layers(SplitDecision(1, None, ""), 8000, 0.001)
    assert policy.decide(QUEUE, 1).layers == 6  # three rounds of 2 ms
    assert policy.decide(QUEUE, 50).layers == policy.decide(QUEUE, 64).layers == 32


def test_layers_that_are_given_are_taken() -> None:
    policy = SplitPrefillPolicy(32, SHARES, layers=5)
    assert Device().play(policy, QUEUE, 10).layers == 5
    assert policy.decide(PromptQueue(8000, 3), 32).layers == 3
    assert policy.decide(QUEUE, 0).layers == 5
