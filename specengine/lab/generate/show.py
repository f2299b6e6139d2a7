"""A data set for people to look at."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from specengine.core.config import ModelConfig
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.text import Text


def show_counts(dataset: TokenDataset) -> None:
    from rich.console import Console
    from rich.table import Table

    manifest, lengths = dataset.manifest, dataset.lengths
    table = Table("", "count", title=str(dataset.files.directory), title_justify="left")
    table.columns[1].justify = "right"
    for name, count in manifest.counts.items():
        table.add_row(name, f"{count:,}")
    table.add_row("tokens a document, mean", f"{lengths.mean():.0f}")
    table.add_row("tokens a document, most", f"{lengths.max():,}")
    console = Console()
    console.print(table)
    console.print(f"target {manifest.target.name}, weights {manifest.target.weights[:16]}…")
    console.print(f"data {manifest.data_sha256}")


def show_documents(dataset: TokenDataset, count: int, seed: int, model: str | None) -> None:
    """Print some documents, what is learned in green. Raises DataError for another tokenizer."""
    from rich.console import Console

    target = dataset.manifest.target
    source = resolve_model(ModelConfig(model=model or target.name))
    tokenizer = load_tokenizer(source)
    dataset.check_target(tokenizer_sha256(tokenizer), target.vocab_size)
    console = Console()
    chosen = random.Random(seed).sample(range(len(dataset)), min(count, len(dataset)))
    for index in sorted(chosen):
        document = dataset[index]
        console.rule(f"document {index}, {len(document)} tokens")
        console.print(_coloured(document, tokenizer))


def _coloured(document: Document, tokenizer: Any) -> Text:
    import numpy as np
    from rich.text import Text

    cuts = np.flatnonzero(np.diff(document.loss)) + 1
    text = Text()
    tokens, loss = np.split(document.tokens, cuts), np.split(document.loss, cuts)
    for ids, learned in zip(tokens, loss, strict=True):
        piece = tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        text.append(piece, style="green" if learned[0] else "dim")
    return text
