"""The one way in which this package compiles functions.

numba's own cache looks only at the file of the function itself, so a change in a helper of another file would go unseen
and old machine code would run. Therefore the compiled code is kept in a folder named after all sources of the package.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba

P = ParamSpec("P")
T = TypeVar("T")

_CONFIG: Any = numba.config


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile at the first call, or load what an earlier process compiled. No fast-math: results are the same everywhere."""
    return _compile(function, inline=False)


def inlined(function: Callable[P, T]) -> Callable[P, T]:
    """The same, and a part of every caller's code: for what is small and called most; a call counts references to every
    array of a frame and a layer, which takes longer than placing a replica."""
    return _compile(function, inline=True)


def _compile(function: Callable[P, T], *, inline: bool) -> Callable[P, T]:
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = _FOLDER
    try:
        made: Callable[P, T] = numba.njit(cache=True, error_model="numpy", forceinline=inline)(function)
    finally:
        _CONFIG.CACHE_DIR = before
    return made


def _folder() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = _CONFIG.CACHE_DIR or str(Path(cache) / "elastic-placement")
    return str(Path(base) / digest.hexdigest())


_FOLDER = _folder()
