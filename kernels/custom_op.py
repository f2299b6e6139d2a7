"""An operation in several forms, and the one place where it is decided which of them runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from specengine.kernels.dispatch import Backend, use_native, use_triton
from specengine.kernels.opaque import is_traced, opaque


class CustomOp(ABC):
    """A subclass has the forms that exist, as static methods of the same arguments, the first of
    which is a tensor; an instance is called with them, and has no state.

    | form | runs |
    |---|---|
    | triton | on CUDA tensors where Triton is installed, and for backend="triton" |
    | native | C, for few rows on a CPU that `takes_native`, and for backend="native" |
    | torch | everywhere else, and for backend="torch" |
    | a node | while torch.compile traces a caller (kernels/opaque.py) |

    A node runs as any of the first three when its graph runs; what compiles the graph may take
    `torch` in its place. An operation need not know when torch.compile begins or ends.
    """

    schema = ""  # of the node, such as "double(Tensor x) -> Tensor"; "" for none: traced through

    def __init__(self) -> None:
        self._node: Any = None
        if self.schema:
            self._node = opaque(self.schema, self.__call__, self.fake, self.torch)

    @staticmethod
    @abstractmethod
    def torch(*given: Any) -> Any:
        """In plain PyTorch: the reference, on any device. A function of a module, which compiled
        graphs can name."""

    @staticmethod
    def triton(*given: Any) -> Any:
        """In Triton. It imports its kernels when it is called."""
        raise NotImplementedError

    @staticmethod
    def native(*given: Any) -> Any:
        """In C (kernels/native)."""
        raise NotImplementedError

    @staticmethod
    def takes_native(*given: Any) -> bool:
        return False

    @staticmethod
    def takes_triton(*given: Any) -> bool:
        return True

    @staticmethod
    def fake(*given: Any) -> Any:
        """Tensors of the output's shape, dtype and strides, for a node."""
        raise NotImplementedError

    def __call__(self, *given: Any, backend: Backend = "auto") -> Any:
        if self._node is not None and is_traced():
            return self._node(*given)
        if use_triton(backend, given[0]) and self.takes_triton(*given):
            return self.triton(*given)
        if self.takes_native(*given) and use_native(backend, given[0]):
            return self.native(*given)
        return self.torch(*given)
