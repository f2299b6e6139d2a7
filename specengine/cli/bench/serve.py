"""Measure a server that speaks OpenAI's protocol: latencies and rates by load."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.cli.bench.accept import check_temperature
from specengine.cli.bench.throughput import (
    add_output_arguments,
    add_temperature_argument,
    check_counts,
)
from specengine.cli.logs import set_up_logging
from specengine.core.errors import ConfigError

if TYPE_CHECKING:
    from specengine.lab.serving.loads import Load
    from specengine.lab.serving.prompts import Requests
    from specengine.lab.serving.run import Plan

KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("load: each point on its own, one after the other"))
    _add_requests(parser.add_argument_group("requests"))
    group = parser.add_argument_group("results")
    group.add_argument(
        "--slo",
        metavar="NAME=MS,...",
        help="bounds of goodput, of ttft, tpot and e2e, as in ttft=50,tpot=4",
    )
    group.add_argument(
        "--percentiles",
        type=float,
        nargs="+",
        default=[50, 90, 99],
        metavar="P",
        help="default: 50 90 99",
    )
    group.add_argument("--details", action="store_true", help="each request's times, in the JSON")
    add_output_arguments(group, "serve")


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="default: %(default)s; without a path, /v1 is meant",
    )
    group.add_argument(
        "--model",
        dest="served_model",
        metavar="NAME",
        help="default: the first that it serves",
    )
    group.add_argument("--label", default="a server", metavar="TEXT", help="what reports call it")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"default: {KEY_VARIABLE} of the environment"
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="of a request (default: 600)"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="a closed loop: so many requests at once, each followed by the next (default: 1 8 64)",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests a second at the times of a Poisson process; inf sends all at once",
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at once, most, at a rate"
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        metavar="N",
        help="requests a point, one number for all or one a point (default: 4 for each at once, 8 "
        "at least; 30 s of a rate)",
    )
    group.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="requests before each point, not counted (default: as many as at once; 8 of a rate)",
    )
    group.add_argument(
        "--clients", type=int, metavar="N", help="processes (default: one for 64 streams or 100/s)"
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--send",
        choices=("ids", "text", "chat"),
        help="token ids or text to /completions, or a message to /chat/completions (default: ids "
        "of random prompts and lines of ids, else chat)",
    )
    group.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        metavar="SET",
        help="prompt sets by name, or JSONL files: lines with `prompt` (a text or token ids), "
        "or lines with `turns` or `messages`; default: random prompts, all different",
    )
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="where prompt sets lie")
    group.add_argument(
        "--prompt-len",
        type=int,
        default=512,
        metavar="N",
        help="of random prompts: tokens, or words of a text (default: %(default)s)",
    )
    group.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="tokens (default: %(default)s)"
    )
    group.add_argument(
        "--length-spread",
        type=float,
        default=0.0,
        metavar="X",
        help="each length is drawn from length x (1 ± X) (default: 0)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=1000,
        metavar="N",
        help="random token ids lie below it (default: %(default)s)",
    )
    add_temperature_argument(group)
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of the whole length (default: with random prompts)",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help="further fields of every request, an object"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and times")


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    set_up_logging("info")
    from specengine.cli.bench.tables import show_sheets
    from specengine.lab.environment import environment_line
    from specengine.lab.output import Output
    from specengine.lab.serving.plot import draw
    from specengine.lab.serving.run import ServingBench
    from specengine.lab.serving.sheets import sheets

    output = Output(args.json, args.out, args.name)
    output.check()
    report = ServingBench(plan, output.write).run()
    tables = list(sheets(report))
    show_sheets(report.title, environment_line(report.environment), tables)
    for path in output.finish(report, tables, partial(draw, report)):
        print(path)
    return 1 if report.num_failed else 0


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ConfigError, or DataError for a file of prompts."""
    check_counts(args, "concurrency", "max_concurrency", "num_prompts", "clients")
    check_counts(args, "prompt_len", "output_len")
    check_temperature(args.temperature)
    if args.warmup is not None and args.warmup < 0:
        raise ConfigError(f"--warmup {args.warmup}: must not be negative")
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {args.base_url}: must begin with http:// or https://")
    from specengine.lab.serving.measures import read_slo
    from specengine.lab.serving.run import Plan
    from specengine.lab.serving.told import Server

    loads, counts = _loads(args), tuple(args.num_prompts or ())
    if len(counts) not in (0, 1, len(loads)):
        raise ConfigError(
            f"--num-prompts has {len(counts)} numbers for {len(loads)} points: give one for all, "
            "or one a point, those of --concurrency first"
        )
    return Plan(
        server=Server.at(args.base_url, args.api_key or os.environ.get(KEY_VARIABLE)),
        loads=loads,
        requests=_requests(args),
        model=args.served_model,
        label=args.label,
        num_requests=counts,
        num_warmup=args.warmup,
        num_clients=args.clients,
        slo=read_slo(args.slo),
        percentiles=_percentiles(args.percentiles),
        timeout=args.timeout,
        has_details=args.details,
    )


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    from specengine.lab.serving.loads import Load

    rates = list(dict.fromkeys(args.request_rate or ()))
    if any(not rate > 0 for rate in rates):
        raise ConfigError("--request-rate: must be above 0")
    if args.max_concurrency is not None and not rates:
        raise ConfigError("--max-concurrency goes with --request-rate; say --concurrency")
    at_once = args.concurrency or ([] if rates else [1, 8, 64])
    closed = [Load(number) for number in dict.fromkeys(at_once)]
    return (*closed, *(Load(args.max_concurrency, rate) for rate in rates))


def _requests(args: argparse.Namespace) -> Requests:
    from specengine.lab.serving.prompts import Requests, check_send, find_prompts

    sets, lines = find_prompts(args.prompts, args.data_dir)
    send = args.send or ("chat" if sets else _kind_of(lines))
    check_send(send, sets, lines)
    if not 0 <= args.length_spread < 1:
        raise ConfigError(f"--length-spread {args.length_spread:g}: must be in [0, 1)")
    if args.vocab_size < 2:
        raise ConfigError(f"--vocab-size {args.vocab_size}: must be at least 2")
    is_random = not sets and not lines
    return Requests(
        send=send,
        sets=tuple(sets),
        lines=tuple(lines),
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        spread=args.length_spread,
        vocab_size=args.vocab_size,
        temperature=args.temperature,
        ignore_eos=is_random if args.ignore_eos is None else args.ignore_eos,
        extra=_extra(args.extra_body),
        seed=args.seed,
    )


def _kind_of(lines: list[Any]) -> str:
    return "text" if lines and isinstance(lines[0], str) else "ids"


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("--extra-body must be an object, such as '{\"top_k\": 20}'")
    return found


def _percentiles(asked: list[float]) -> tuple[float, ...]:
    if any(not 0 <= one <= 100 for one in asked):
        raise ConfigError("--percentiles: each must lie in [0, 100]")
    return tuple(dict.fromkeys(asked))
