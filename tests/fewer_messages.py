"""Of a test that passes, a process of pytest-xdist tells the one that hands out tests four times
more than this one reads: that it begins and ends, and that its fixtures were made and put away.
Each message takes both processes a tenth of a millisecond."""

from __future__ import annotations

from typing import Any

import pytest


def quicken(config: pytest.Config) -> None:
    """From now on, in this process; all is told where durations or a file of results are wanted,
    and by a pytest-xdist that has another way."""
    option = config.option
    if option.verbose > 0 or option.durations is not None or option.xmlpath:
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor" and hasattr(plugin, "sendevent"):
            plugin.sendevent = _without_what_nobody_reads(plugin.sendevent)


def _without_what_nobody_reads(send: Any) -> Any:
    def sendevent(name: str, **given: Any) -> None:
        if name not in ("logstart", "logfinish") and not _says_nothing(name, given):
            send(name, **given)

    return sendevent


def _says_nothing(name: str, given: dict[str, Any]) -> bool:
    if name != "testreport":
        return False
    report = given["data"]
    return bool(
        report["outcome"] == "passed" and report["when"] != "call" and not report["sections"]
    )
