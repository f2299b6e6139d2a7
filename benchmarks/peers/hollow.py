"""Runs single source files of a peer without the peer: whatever else they import is a stand-in, by
its name, or hollow."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class HollowType(type):
    """A class that has every attribute. Of use where a peer annotates or configures."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)


def hollow(name: str) -> HollowType:
    def take_anything(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def give_anything(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)

    return HollowType(name, (), {"__init__": take_anything, "__getattr__": give_anything})


class HollowModule(ModuleType):
    """What is asked of it: a stand-in of that name, or something hollow."""

    stand_ins: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.stand_ins.get(name) or hollow(name)


class PeerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, sources: Sequence[str], stand_ins: Mapping[str, Any]) -> None:
        """root: the folder that holds the package, an unpacked wheel or site-packages. sources:
        the modules that are run as they are."""
        self.root, self.sources, self.stand_ins = root, sources, stand_ins
        self.package = sources[0].partition(".")[0]

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        is_package = fullname not in self.sources
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name in self.sources:
            return ModuleType(spec.name)
        module = HollowModule(spec.name)
        module.stand_ins = self.stand_ins
        return module

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, HollowModule):
            return
        file = self.root / (module.__name__.replace(".", "/") + ".py")
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)


@contextmanager
def peer_modules(finder: PeerFinder) -> Iterator[None]:
    """Within it the peer's name is the finder's, whether the peer is installed or not."""
    first = finder.package
    kept = {name: one for name, one in sys.modules.items() if name.partition(".")[0] == first}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == first]:
            del sys.modules[name]
        sys.modules.update(kept)
