"""Forwards of the target in pieces, as the configuration asks for them."""

from __future__ import annotations

import logging

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.graph_config import GraphConfig
from specengine.core.parallel import Communicator
from specengine.engine.phases import Phases
from specengine.runner.model_runner import ModelRunner
from specengine.runner.piecewise.forwards import PiecewiseForwards, PiecewiseOptions

logger = logging.getLogger(__name__)
_PIECE = 64 << 10  # bytes of one piece's graph, a safe guess


def add_pieces(
    graph: GraphConfig, runner: ModelRunner, phases: Phases, ranks: Communicator, is_asked: bool
) -> PiecewiseForwards | None:
    """Trace the target and capture its largest size, before other graphs: those use its memory
    again. ranks: that share its layers. is_asked: by the configuration; else a model that cannot be
    cut into pieces has none. Raises ModelLoadError for a model that torch.compile cannot trace as
    one graph, ConfigError where shared experts are to be within the pieces."""
    sizes, splits = graph.piecewise_cuda_graph_tokens, graph.piecewise_splitting_ops
    if not graph.has_pieces or sizes is None or splits is None:
        return None
    shares = runner.sharers is not None
    if shares and "shared_experts" not in splits:
        raise ConfigError(
            "--piecewise-splitting-ops: engines that share experts have different numbers of rows "
            "to run at once, which no graph can hold: add shared_experts"
        )
    from torch._dynamo.exc import TorchDynamoException

    options = PiecewiseOptions(sizes, graph.piecewise_compiler, splits)
    try:
        with phases.phase("trace the model"):
            runner.pieces = PiecewiseForwards(runner, options, ranks, shares)
    except Exception as error:
        if not is_asked:
            reason = str(error).strip().split("\n")[0]
            logger.warning("prompts run eagerly, as the model has no pieces: %s", reason)
            return None
        if not isinstance(error, TorchDynamoException):
            raise
        raise ModelLoadError(
            f"--cuda-graph-mode {graph.cuda_graph_mode}: the model cannot be traced as one graph: "
            f"{error}"
        ) from error
    with phases.phase("capture pieces"):
        runner.pieces.capture()
    return runner.pieces


def piece_bytes(graph: GraphConfig, num_layers: int, bytes_per_token: int) -> int:
    """What graphs of pieces are expected to take: temporary tensors of the largest size, which the
    others share, and the launches. bytes_per_token: of a forward."""
    sizes = graph.piecewise_cuda_graph_tokens
    if not graph.has_pieces or sizes is None:
        return 0
    return max(sizes) * bytes_per_token + len(sizes) * (num_layers + 1) * _PIECE
