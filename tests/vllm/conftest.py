"""Fixtures of more than one module."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.router_stand import Stand, Start


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    made: list[Stand] = []

    async def begin(ranks: int = 2, **settings: Any) -> Stand:
        stand = Stand(tmp_path)
        made.append(stand)
        await stand.start(ranks, **settings)
        return stand

    yield begin
    for stand in made:
        await stand.aclose()
