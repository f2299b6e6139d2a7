"""A report as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specengine.lab.accept.report import Report
from specengine.lab.accept.sheet import Sheet
from specengine.lab.accept.sheets import sheets
from specengine.lab.environment import environment_line


def markdown(report: Report, plots: Mapping[str, str]) -> str:
    """plots: file names by title."""
    lines = [f"# {report.title}", "", *_provenance(report)]
    for sheet in sheets(report):
        lines += ["", f"## {sheet.title}", "", *([sheet.note, ""] if sheet.note else [])]
        lines += table(sheet)
    if plots:
        lines += ["", "## Plots", ""]
        lines += [f"![{title}]({name})" for title, name in plots.items()]
    lines += ["", "## Settings", "", *_settings(report), "", "## Data", "", *_data(report)]
    return "\n".join(lines) + "\n"


def table(sheet: Sheet) -> Iterator[str]:
    yield _row(sheet.columns)
    yield "|" + "---|" * len(sheet.columns)
    for row in sheet.rows:
        yield _row(row)


def _provenance(report: Report) -> list[str]:
    target, protocol = report.target, report.protocol
    prompts = "through the chat template" if protocol["chat_template"] else "as plain text"
    temperatures = ", ".join(f"{value:g}" for value in protocol["temperatures"])
    return [
        f"{report.date}, {environment_line(report.environment)}.",
        "",
        f"    {report.environment['command']}",
        "",
        f"Target {target['name']} in {target['quantization'] or target['dtype']} on "
        f"{target['device']}. Temperature {temperatures}, at most {protocol['max_new_tokens']} new "
        f"tokens an answer, prompts {prompts}, at most {protocol['batch_size']} requests at once "
        f"(which does not change τ), seed {protocol['seed']}.",
        "",
        f"SHA-256 of the target's weights {target['weights_sha256']}, its tokenizer "
        f"{target['tokenizer_sha256']}, its chat template {target['chat_template_sha256']}.",
    ]


def _settings(report: Report) -> Iterator[str]:
    for setting in report.settings:
        options = " ".join(f"{name}={value}" for name, value in setting.options.items())
        line = f"- **{setting.name}**: `{options or 'plain decoding'}`"
        if setting.draft is not None:
            line += "; " + _hashes(setting.draft)
        yield line


def _data(report: Report) -> Iterator[str]:
    for one in report.data:
        yield (
            f"- {one['name']}: {one['prompts']} of {one['available']} prompts, {one['source']}, "
            f"SHA-256 {one['sha256']}"
        )
    for setting in report.settings:
        for run in setting.runs:
            yield from (f"- left out by {setting.name}: {why}" for why in run.skipped)


def _hashes(draft: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in draft.items())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
