"""The one way in which this package compiles functions.

numba's own cache looks only at the file of the function itself, so a change in a helper of another file would go unseen
and old machine code would run. Therefore the compiled code is kept in a folder named after all sources of the package.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Compile at the first call, or load what an earlier process compiled. No fast-math: results are the same everywhere."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER
    try:
        made: Callable[P, T] = numba.njit(cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    return made


def _folder() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = numba.config.CACHE_DIR or str(Path(cache) / "elastic-placement")
    return str(Path(base) / digest.hexdigest())


_FOLDER = _folder()
