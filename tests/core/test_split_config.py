"""Shares of the SMs that long prompts may have, and what they mean."""

from __future__ import annotations

import pytest

from specengine.core.errors import ConfigError
from specengine.core.split_config import SplitConfig


@pytest.mark.parametrize(
    ("shares", "parts", "turns", "lanes"),
    [
        (None, [], True, 1),
        ((1.0,), [], True, 1),
        ((0.5, 0.76), [0.5, 0.76], False, 3),
        ((0.5, 0.76, 1.0), [0.5, 0.76], True, 3),
    ],
)
def test_share_of_all_sms_means_turns_and_takes_no_part_of_them(
    shares: tuple[float, ...] | None, parts: list[float], turns: bool, lanes: int
) -> None:
    config = SplitConfig(enable_pdmux=True, pdmux_sm_shares=shares)
    assert config.sm_parts == parts
    assert config.takes_turns == turns
    assert config.num_lanes == lanes


@pytest.mark.parametrize("shares", [(), (0.0, 0.5), (0.5, 1.1)])
def test_share_outside_of_the_device_is_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="pdmux-sm-shares"):
        SplitConfig(enable_pdmux=True, pdmux_sm_shares=shares)
