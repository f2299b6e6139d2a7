"""What glibc's allocator keeps to itself, in a process that serves."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from specengine.core.trim import LARGE, NUM_ARENAS

pytestmark = pytest.mark.skipif(
    not all(hasattr(ctypes.CDLL(None), name) for name in ("mallopt", "mallinfo2", "malloc_info")),
    reason="needs glibc 2.33",
)
START = """
import ctypes, os, sys, tempfile, threading
from specengine.core.trim import LARGE, map_large_blocks, share_arenas

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = libc.fclose.argtypes = (ctypes.c_void_p,)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
"""
ARENAS = """
if "share" in sys.argv:
    share_arenas()
meet = threading.Barrier(6)
def allocate():
    meet.wait()
    libc.malloc(5000)
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(6)]
for one in threads: one.start()
for one in threads: one.join()
read, write = os.pipe()
stream = libc.fdopen(write, b"w")
libc.malloc_info(0, stream)
libc.fclose(stream)
print(os.read(read, 65536).count(b"<heap nr="))
"""
MAPPED = """
if "map" in sys.argv:
    map_large_blocks()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                 "uordblks", "fordblks", "keepcost")]
libc.mallinfo2.restype = Info
libc.free(libc.malloc(30 * 2**20))
before = libc.mallinfo2().hblks
libc.malloc(2 * LARGE)
print(libc.mallinfo2().hblks - before)
"""


def printed(code: str, *given: str, more: Mapping[str, str] | None = None) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    variables = kept | {"PYTHONPATH": os.pathsep.join(sys.path)} | (dict(more) if more else {})
    command = [sys.executable, "-c", START + code, *given]
    return int(subprocess.run(command, env=variables, capture_output=True, check=True).stdout)


def test_threads_share_an_arena() -> None:
    assert printed(ARENAS) > NUM_ARENAS
    assert printed(ARENAS, "share") == NUM_ARENAS
    assert printed(ARENAS, "share", more={"MALLOC_ARENA_MAX": "4"}) == 4


def test_large_blocks_are_mapped_though_a_larger_one_was_freed() -> None:
    assert printed(MAPPED) == 0
    assert printed(MAPPED, "map") == 1
    assert printed(MAPPED, "map", more={"MALLOC_MMAP_THRESHOLD_": str(4 * LARGE)}) == 0
