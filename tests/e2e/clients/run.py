"""Runs clients against a server, each in an environment of its own.

    python -m tests.e2e.clients.run [NAME ...] [--model tiny] [--base-url URL] [--page FILE]

Environments are kept in --cache. Exit status 1 where a client fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.clients.catalogue import CLIENTS, Client
from tests.e2e.clients.server import HERE, served

TIMEOUT = 900  # seconds for a client's script


@dataclass(frozen=True)
class Outcome:
    client: Client
    versions: str
    checks: list[str]
    failure: str | None
    seconds: float


def main() -> int:
    args = _arguments()
    chosen = [one for one in CLIENTS if not args.names or one.name in args.names]
    args.cache.mkdir(parents=True, exist_ok=True)
    log = args.cache / "server.log"
    running = nullcontext(args.base_url) if args.base_url else served(args.model, log)
    with running as url:
        outcomes = [_run(client, url, args) for client in chosen]
    page = drawn(outcomes, args.model)
    print(page)
    if args.page is not None:
        args.page.write_text(page)
    return int(any(one.failure for one in outcomes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--base-url", help="of a server that runs already")
    parser.add_argument("--page", type=Path, help="Markdown file for the results")
    default = Path(tempfile.gettempdir()) / "specengine-clients"
    parser.add_argument("--cache", type=Path, default=default)
    return parser.parse_args()


def _run(client: Client, url: str, args: argparse.Namespace) -> Outcome:
    print(f"== {client.name}", flush=True)
    started = time.monotonic()
    try:
        python = _environment(client, args.cache)
        versions = _versions(client, python)
    except subprocess.CalledProcessError as error:
        return Outcome(client, "", [], f"cannot be installed: {error}", 0.0)
    extra = {"REFERENCE": str(_reference(client, args))} if client.reference else {}
    settings = {"BASE_URL": url, "MODEL": args.model, "TOKENIZER": _tokenizer(args.model), **extra}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(python), str(HERE / client.script)],
            env={**os.environ, **settings, "OPENAI_API_KEY": "none", "PYTHONPATH": str(HERE)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    sys.stdout.write(done.stdout)
    checks = [line[4:] for line in done.stdout.splitlines() if line.startswith("ok: ")]
    failure = None
    if done.returncode:
        sys.stdout.write(done.stderr[-6000:])
        failure = (done.stderr.strip().splitlines() or ["it ended with an error"])[-1]
    return Outcome(client, versions, checks, failure, time.monotonic() - started)


def _environment(client: Client, cache: Path) -> Path:
    """Its Python. An environment that exists is taken as it is."""
    folder = cache / client.name
    python = folder / "bin/python"
    marker = folder / "complete"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*install, *client.packages], check=True)
        if client.bare:
            subprocess.run([*install, "--no-deps", *client.bare], check=True)
        if client.borrows_torch:
            _lend(folder)
        marker.touch()
    return python


def _lend(environment: Path) -> None:
    """The folder that torch lies in comes last on the path."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(str(Path(found.origin).parents[1]) + "\n")


def _versions(client: Client, python: Path) -> str:
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    command = [str(python), "-c", code, *client.version_of]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return ", ".join(f"{n} {v}" for n, v in zip(client.version_of, found, strict=True))


def _reference(client: Client, args: argparse.Namespace) -> Path:
    path: Path = args.cache / f"{client.name}-reference.json"
    module = "tests.e2e.clients." + str(client.reference).removesuffix(".py")
    subprocess.run([sys.executable, "-m", module, _tokenizer(args.model), str(path)], check=True)
    return path


def _tokenizer(model: str) -> str:
    """The directory of a model, which holds its tokenizer."""
    from specengine.core.config import ModelConfig
    from specengine.runner.loader.source import resolve_model

    return str(resolve_model(ModelConfig(model=model)).directory)


def drawn(outcomes: list[Outcome], model: str) -> str:
    """A page of documentation."""
    today = time.strftime("%Y-%m-%d")
    lines = [
        "# Clients",
        "",
        "Which clients of OpenAI's protocol work unchanged?",
        "",
        f"Each ran in an environment of its own against `specengine serve {model}`, EAGLE-3 with "
        "drafts in every round,",
        f"by `python -m tests.e2e.clients.run --page docs/clients.md` on {today}.",
        "The scripts are in `tests/e2e/clients/`.",
        "",
        "| client | versions | what was driven | result |",
        "|---|---|---|---|",
    ]
    for one in outcomes:
        result = "passes" if one.failure is None else f"fails: {one.failure}".replace("|", "/")
        cells = [one.client.name, one.versions, "; ".join(one.checks), result[:200]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
