"""Base class of the workers that run a model."""

from __future__ import annotations

from specengine.core.batch import ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.runner.model_runner import ModelRunner


class TpModelWorker:
    """Owns one ModelRunner: the target's worker; draft workers subclass it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> LogitsOutput:
        """Run the model on a batch. Logits are float32 [R, V], for the batch's logits_rows."""
        return self.runner.forward(batch)
