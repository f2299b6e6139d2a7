"""What the policy of split prompts decides on recorded histories of rounds and calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
    """A history of one: seconds of a round alone, of a layer of a prompt alone, and of what follows
    its last layer; by which part of their share prompts slow rounds down; how many times as long a
    layer takes on a share as the share's part of the device would need alone."""

    round: float = 0.010
    layer: float = 0.006
    harm: float = 0.5
    head: float = 0.0
    waste: float = 1.0

    def layer_on(self, share: float | None) -> float:
        return self.layer if share is None else self.layer * self.waste / share

    def play(self, policy: SplitPrefillPolicy, queue: PromptQueue, steps: int) -> SplitDecision:
        """Rounds of 32 requests, a prompt always beside them."""
        for _ in range(8):
            policy.saw_round(32, self.round, None)
        decision = policy.decide(queue, 32)
        for _ in range(steps):
            seconds = self.layer_on(decision.share) * decision.layers
            if decision.layers:
                policy.saw_layers(decision, queue.num_tokens, seconds)
            if decision.share is not None:
                policy.saw_round(32, self.round * (1 + self.harm * decision.share), decision)
            else:
                policy.saw_round(32, self.round, None, seconds)
            decision = policy.decide(queue, 32)
        return decision


def test_without_rounds_all_layers_run_on_the_whole_device() -> None:
    policy = SplitPrefillPolicy(32, SHARES)
    assert policy.decide(QUEUE, 0) == SplitDecision(32, None, "no round runs")


@pytest.mark.parametrize("shares", [(), SHARES])
def test_what_was_never_measured_begins_small(shares: tuple[float, ...]) -> None:
    decision = SplitPrefillPolicy(32, shares, turns=not shares).decide(QUEUE, 32)
    assert decision.layers == (4 if shares else 1)
    assert SplitPrefillPolicy(32, shares).decide(QUEUE, 32) == SplitPrefillPolicy(32).decide(
        QUEUE, 32
    )


@dataclass
class Traffic:
    """Prompts of 32 layers every so many seconds (0: without end), on a device whose rounds never
    stop. A second of a call on a share does `share` of the whole device's work. An answer takes so
    many rounds; one ends every third round."""

    every: float
    device: Device
    shares: tuple[float, ...] = ()
    ratio: float = 1.5
    turns: bool = True
    answer: int = 103

    def run(self, seconds: float) -> Served:
        """Over the second half."""
        policy = SplitPrefillPolicy(32, self.shares, self.ratio, turns=self.turns)
        now, left, arrived, came = 0.0, 0, 0.0, 0
        ends, prompts = list[float](), list[tuple[float, float]]()
        while now < seconds:
            if not left and now >= came * self.every + 0.2:
                left, arrived, came = 32, came * self.every + 0.2 if self.every else now, came + 1
            call, delay, slowdown = None, 0.0, 1.0
            if left:
                behind = 0 if self.every else 8000
                call = policy.decide(PromptQueue(8000, left, behind), 32)
                took = call.layers * self.device.layer_on(call.share)
                if call.layers:
                    policy.saw_layers(call, 8000, took)
                left -= call.layers
                delay = 0.0 if left else self.device.head
                if call.share is None:
                    delay, call = delay + took, None
                else:
                    slowdown = 1 + self.device.harm * call.share
                if not left:
                    prompts.append((now, now + delay - arrived))
            lasted = self.device.round * slowdown
            policy.saw_round(32, lasted, call, delay)
            now += lasted + delay
            ends.append(now)
            if len(ends) > self.answer and len(ends) % 3 == 0:
                policy.saw_answer(now - ends[-1 - self.answer])
        ends = [one for one in ends if one > seconds / 2]
        spans = [b - a for a, b in zip(ends, ends[self.answer :], strict=False)]
        gaps = [b - a for a, b in pairwise(ends)]
        alone = 32 * self.device.layer + self.device.head
        return Served(
            (ends[-1] - ends[0]) / (len(ends) - 1) / self.device.round,
            max(spans, default=0.0) / self.answer / self.device.round,
            max((took for at, took in prompts if at > seconds / 2), default=0.0) / alone,
            max(gaps),
        )


@dataclass
class Served:
    """How many times as long tokens took, in the mean and of the slowest answer; and the slowest
    prompt. gap: the longest between two rounds, in seconds."""

    tokens: float
    answer: float
    prompt: float
    gap: float


# A prompt of 8,000 tokens and 32 streams of an 8B model with EAGLE-3, as measured on an H200.
H200 = Device(round=0.0069, layer=0.0064, harm=2.76, head=0.009, waste=1.23)


@pytest.mark.parametrize("every", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("round_seconds", [0.002, 0.010, 0.030])
def test_in_turns_tokens_keep_to_the_ratio(every: float, round_seconds: float) -> None:
    device = Device(round=round_seconds, layer=0.0008)  # a layer is less than a round may wait
    found = Traffic(every, device).run(30.0)
    assert found.answer <= 1.5
    assert found.tokens > 1.35 or every, "what rounds bear is given to prompts"


def test_in_turns_a_prompt_a_second_on_an_h200_keeps_both_ratios() -> None:
    found = Traffic(1.0, H200).run(30.0)
    assert found.answer <= 1.4
    assert found.prompt <= 1.35
    assert found.gap <= 5 * H200.layer + H200.round + H200.head


@pytest.mark.parametrize("every", [0.0, 0.3, 0.6])
def test_in_turns_prompts_without_end_wait_so_that_tokens_keep_to_the_ratio(every: float) -> None:
    """A layer alone takes nearly as long as a round: most rounds have none before them."""
    found = Traffic(every, H200).run(30.0)
    assert 1.4 <= found.tokens <= 1.47
    assert found.answer <= 1.5
    assert found.gap <= 5 * H200.layer + H200.round + H200.head


def test_in_turns_a_prompt_now_and_then_is_given_much() -> None:
    rare = Traffic(2.0, Device(layer=0.004)).run(20.0)
    endless = Traffic(0.0, Device(layer=0.004)).run(20.0)
    assert rare.prompt < 1.5
    assert endless.prompt > 3.0  # at most a third of the time is theirs


def test_layer_longer_than_rounds_ever_bear_runs_once_in_an_answer() -> None:
    """A first call that compiles kernels does not keep its prompt waiting for good."""
    policy, one = SplitPrefillPolicy(32), SplitDecision(1, None, "")
    policy.saw_answer(1.0)
    policy.saw_round(32, 0.010)
    policy.saw_layers(one, 8000, 30.0)
    policy.saw_round(32, 0.010, None, 30.0)
    waited = 0
    while not policy.decide(QUEUE, 32).layers and waited < 200:
        policy.saw_round(32, 0.010)
        waited += 1
    assert 95 <= waited <= 105
    assert policy.decide(QUEUE, 32).layers == 1
    policy.saw_layers(one, 8000, 0.006)
    assert policy.decide(QUEUE, 32).layers > 1


def test_delay_between_interrupted_rounds_counts_against_prompts() -> None:
    """It is no round's, and tokens wait for it all the same."""
    policy = SplitPrefillPolicy(32)
    Device().play(policy, QUEUE, 1)
    assert policy.decide(QUEUE, 32).layers
    policy.saw_delay(1.0)
    assert policy.decide(QUEUE, 32).layers == 0
    for _ in range(400):
        policy.saw_round(32, 0.010)
    assert policy.decide(QUEUE, 32).layers


def test_turn_that_stalled_once_is_forgotten_with_the_next_one() -> None:
    policy = SplitPrefillPolicy(32)
    usual = Device().play(policy, QUEUE, 20).layers
    one = SplitDecision(1, None, "")
    policy.saw_layers(one, 8000, 0.6)
    assert policy.decide(QUEUE, 32).layers < usual
    policy.saw_layers(one, 8000, 0.006)
    assert policy.decide(QUEUE, 32).layers == usual


def test_shares_that_do_less_than_turns_are_measured_and_left() -> None:
    policy, shares = SplitPrefillPolicy(32, (0.5, 0.76)), list[float | None]()
    for _ in range(60):
        shares.append(H200.play(policy, QUEUE, 1).share)
    assert set(shares[:30]) == {None, 0.5, 0.76}
    assert set(shares[30:]) == {None}
    for share in (0.5, 0.76):
        rounds = 1 / (1 + H200.harm * share)
        assert policy.both_together(share) == pytest.approx(share / H200.waste + rounds)


def test_share_that_does_more_than_turns_is_chosen() -> None:
    policy = SplitPrefillPolicy(32, (0.5, 0.76))
    assert Device(harm=0.3).play(policy, QUEUE, 60).share == 0.76
    policy = SplitPrefillPolicy(32, (0.5, 0.76), turns=False)
    assert Device(harm=4.0).play(policy, QUEUE, 60).share == 0.5, "turns are not allowed"


def test_share_beside_which_no_round_is_measured_is_given_up() -> None:
    policy, device = SplitPrefillPolicy(32, (0.5,)), Device()
    for _ in range(8):
        policy.saw_round(32, device.round)
    policy.saw_layers(SplitDecision(1, None, ""), 8000, device.layer)
    for _ in range(8):
        call = policy.decide(QUEUE, 32)
        assert call.share == 0.5
        policy.saw_layers(call, 8000, call.layers * device.layer_on(0.5))
    assert policy.decide(QUEUE, 32).share is None


def test_shares_are_not_measured_while_rounds_bear_no_more() -> None:
    policy = SplitPrefillPolicy(32, (0.5,))
    policy.saw_round(32, 0.010, None, 0.006)
    policy.saw_layers(SplitDecision(1, None, ""), 8000, 0.006)
    policy.saw_delay(1.0)
    assert policy.decide(QUEUE, 32).share is None


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
    for _ in range(10_100):
        policy.saw_round(32, 0.0107, small)
    assert policy.slowdown(0.76) == pytest.approx(1 + 0.39 * 0.76 / 0.5, rel=0.01)


def test_short_answers_among_long_ones_count_by_their_time() -> None:
    """Prompts with few tokens of output end beside long answers, which most tokens belong to."""
    policy = SplitPrefillPolicy(32)
    for _ in range(10):
        policy.saw_answer(1.0)
        policy.saw_answer(0.02)
    assert policy._lately.seconds > 0.9


def test_where_answers_are_short_a_prompt_is_given_less() -> None:
    policy, device = SplitPrefillPolicy(32), Device(layer=0.004)
    policy.saw_layers(SplitDecision(1, None, ""), 8000, device.layer)
    counts = []
    for seconds in (8.0, 1.0, 0.1):
        for _ in range(300):
            policy.saw_answer(seconds)
        for _ in range(400):
            policy.saw_round(32, device.round)
        counts.append(policy.decide(QUEUE, 32).layers)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 9  # a prompt needs 3.3 rounds
    assert counts[-1] == 1  # what every round bears


def test_on_an_h100_a_prompt_a_second_has_the_large_share_and_tokens_keep_to_the_ratio() -> None:
    """As if what a share takes from rounds and what it gives to prompts added up to the device."""
    device = Device(round=0.0077, layer=0.0065, harm=2.0)  # 2.5 times on 0.76
    found = Traffic(1.0, device, (0.5, 0.76), turns=False).run(20.0)
    assert found.tokens <= 1.5
    assert found.prompt <= 1.5


def test_on_shares_tokens_keep_to_the_ratio() -> None:
    harmful = Device(harm=1.5)  # rounds of 1.75 and 1.98 times
    found = Traffic(1.0, harmful, (0.5, 0.65), turns=False).run(20.0)
    assert found.tokens <= 1.5
    assert found.prompt <= 1 / 0.65 + 0.1  # the largest share serves it
    found = Traffic(0.0, Device(harm=0.6), (0.3, 0.5, 0.65), turns=False).run(20.0)
    assert found.tokens <= 1.5


def test_in_turns_no_call_delays_a_round_by_more_than_the_prompt_needs() -> None:
    """A prompt that runs 10/3 as long as rounds between them ends after 1.3 times its own time."""
    policy = SplitPrefillPolicy(64, tpot_ratio=20.0)
    long = PromptQueue(num_tokens=8000, layers_left=64)
    assert Device(layer=0.001).play(policy, long, 20).layers == 34


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
    decision = Device(harm=harm).play(SplitPrefillPolicy(32, SHARES, turns=False), CROWD, 200)
    assert decision.share == share
    policy = SplitPrefillPolicy(32, SHARES, tpot_ratio=10.0, turns=False)
    assert Device(harm=harm).play(policy, CROWD, 60).share == 0.8


def test_where_none_waits_the_share_is_the_smallest_that_serves_the_prompt() -> None:
    """1 / 0.8 of the time alone is below PROMPT_RATIO, 1 / 0.65 is not; measured ones go before."""
    assert 1 / 0.8 < PROMPT_RATIO < 1 / 0.65
    policy = SplitPrefillPolicy(32, SHARES, turns=False)
    assert Device(harm=0.1).play(policy, QUEUE, 20).share == 0.8
    policy.saw_layers(SplitDecision(32, None, ""), 8000, 32 * 0.012)  # alone it is no faster
    for _ in range(3):  # two do not count
        policy.saw_layers(SplitDecision(4, 0.5, ""), 8000, 4 * 0.013)
    assert policy.decide(QUEUE, 32).share == 0.5
    assert policy.decide(CROWD, 32).share == 0.8


def test_a_call_lasts_as_long_as_a_round_beside_it() -> None:
    policy = SplitPrefillPolicy(32, SHARES, turns=False)
    device = Device(round=0.020, layer=0.004, harm=0.25)
    decision = device.play(policy, CROWD, 40)
    seconds = decision.layers * device.layer_on(decision.share)
    beside = 0.020 * (1 + 0.25 * 0.8)
    assert decision.share == 0.8
    assert beside <= seconds < beside + device.layer_on(decision.share)


def test_rounds_that_become_slower_beside_prompts_take_their_share_back() -> None:
    policy = SplitPrefillPolicy(32, SHARES, turns=False)
    assert Device(harm=0.1).play(policy, CROWD, 40).share == 0.8
    assert Device(harm=2.0).play(policy, CROWD, 40).share == 0.5


def test_costs_of_rounds_are_kept_by_batch_size() -> None:
    policy = SplitPrefillPolicy(32)
    for _ in range(5):
        policy.saw_round(1, 0.002, None)
        policy.saw_round(64, 0.030, None)
    policy.saw_layers(SplitDecision(1, None, ""), 8000, 0.001)
    assert policy.decide(QUEUE, 1).layers == 7  # 3.3 rounds of 2 ms
    assert policy.decide(QUEUE, 50).layers == policy.decide(QUEUE, 64).layers == 32


def test_layers_that_are_given_are_taken() -> None:
    policy = SplitPrefillPolicy(32, SHARES, layers=5)
    assert Device().play(policy, QUEUE, 10).layers == 5
    assert policy.decide(PromptQueue(8000, 3), 32).layers == 3
    assert policy.decide(QUEUE, 0).layers == 5
