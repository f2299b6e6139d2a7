"""Options of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.core.options import option
from specengine.core.registry import PIECEWISE_COMPILERS, SPLITTING_OPS
from specengine.core.section import Section


@dataclass(frozen=True, kw_only=True)
class GraphConfig(Section):
    disable_cuda_graph: bool = option(False, "capture no graph of a whole forward")
    cuda_graph_mode: str = option(
        "auto",
        "full: a graph a forward or a round; piecewise: the target's forwards as graphs of what "
        "lies between attention; full-and-piecewise: pieces where no whole graph serves a batch; "
        "auto: full, and of models with recurrent state full-and-piecewise",
        ("auto", "full", "none", "piecewise", "full-and-piecewise"),
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = option(
        None, "padded numbers of tokens of forwards in pieces; default: 36 sizes up to 2048"
    )
    piecewise_compiler: str = option(
        "eager",
        "what compiles pieces; eager: nothing does, they are the engine's own kernels",
        tuple(PIECEWISE_COMPILERS),
    )
    piecewise_splitting_ops: tuple[str, ...] | None = option(
        None,
        f"where forwards are cut into pieces: some of {', '.join(SPLITTING_OPS)}; default: all but "
        "all_reduce",
    )
    cuda_graph_bs: tuple[int, ...] | None = option(None, "batch sizes to capture")
    cuda_graph_max_bs: int | None = option(None, "largest batch size to capture; default 256")
    disable_cuda_graph_padding: bool = option(False, "replay only at exactly captured sizes")
    enable_torch_compile: bool = option(
        False, "capture decoder layers as torch.compile makes them, not the engine's own kernels"
    )
    torch_compile_max_bs: int = option(32, "largest batch size that torch.compile is for")
    debug_cuda_graph: bool = option(False, "check before each replay that no input has moved")
    cuda_graph_profile: str | None = option(
        None, "file for the kernels of each captured graph and what they take; log: the log"
    )

    def _check_ranges(self) -> None:
        sizes = self.cuda_graph_bs
        self._require(
            sizes is None or (len(sizes) > 0 and min(sizes) >= 1),
            "cuda_graph_bs",
            "give batch sizes of at least 1, such as 1,2,4,8; --disable-cuda-graph captures none",
        )
        self._at_least(1, "cuda_graph_max_bs", "torch_compile_max_bs")
        tokens, ops = self.piecewise_cuda_graph_tokens, self.piecewise_splitting_ops
        self._require(
            tokens is None or (len(tokens) > 0 and min(tokens) >= 1),
            "piecewise_cuda_graph_tokens",
            "give numbers of tokens of at least 1, such as 64,256,1024",
        )
        self._require(
            ops is None or (len(ops) > 0 and set(ops) <= set(SPLITTING_OPS)),
            "piecewise_splitting_ops",
            f"known: {', '.join(SPLITTING_OPS)}",
        )
        if not self.has_pieces:
            of_pieces = (one for one in self.options() if one.startswith("piecewise_"))
            self._refuse_given(of_pieces, "--cuda-graph-mode piecewise or full-and-piecewise")

    @property
    def has_pieces(self) -> bool:
        """Whether the target's forwards may run in pieces."""
        return self.cuda_graph_mode in ("piecewise", "full-and-piecewise")
