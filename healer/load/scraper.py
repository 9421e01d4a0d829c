"""Fetches metrics endpoints, all at once, each with a deadline. A dead or slow endpoint costs nobody else anything."""

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType

import httpx
import msgspec

from healer.clock import Clock
from healer.load.exposition import MAX_BYTES, BadText, Endpoint, Query
from healer.load.readings import GROUP, Reading

CONCURRENT = 64
"""Requests under way at a time; more would only wait for each other here."""


class Place(msgspec.Struct, frozen=True):
    """An endpoint that is to be read."""

    url: str
    slot: int = GROUP
    """Whose values it shows; `GROUP`: the group's, or of the slots that a label names."""


class SourceState(msgspec.Struct, frozen=True):
    """How the last look at an endpoint went."""

    url: str
    at: float
    """Monotonic seconds of the last answer; -inf: there was none yet."""
    error: str
    """Why the last look failed; empty: it did not."""
    took_s: float


class Scraper:
    """Owned by one task. `read` never raises for what an endpoint does; close it with `close`, or use it as a context."""

    def __init__(self, clock: Clock, deadline_s: float, client: httpx.AsyncClient | None = None) -> None:
        self._clock, self._deadline_s = clock, deadline_s
        # no proxy for endpoints of the cluster, and no CA bundle, which takes 15 ms to load
        limits = httpx.Limits(max_connections=CONCURRENT)
        self._client = client or httpx.AsyncClient(trust_env=False, verify=False, limits=limits)
        self._gate = asyncio.Semaphore(CONCURRENT)
        self._endpoints: dict[Place, tuple[tuple[Query, ...], Endpoint]] = {}
        self.states: dict[Place, SourceState] = {}

    async def read(self, wanted: Mapping[Place, tuple[Query, ...]]) -> tuple[Reading, ...]:
        """What all places show now of what is asked of each; ends within the deadline. Places that are not named any more
        are forgotten."""
        for gone in self._endpoints.keys() - wanted.keys():
            del self._endpoints[gone]
            self.states.pop(gone, None)
        end = asyncio.get_running_loop().time() + self._deadline_s
        found = await asyncio.gather(*(self._one(place, queries, end) for place, queries in wanted.items()))
        return tuple(reading for readings in found for reading in readings)

    async def _one(self, place: Place, queries: tuple[Query, ...], end: float) -> tuple[Reading, ...]:
        known = self._endpoints.get(place)
        if known is None or known[0] != queries:
            known = self._endpoints[place] = queries, Endpoint(queries, place.slot)
        before = self.states.get(place)
        began = time.perf_counter()
        at, error = before.at if before else float("-inf"), ""
        readings: tuple[Reading, ...] = ()
        try:
            async with asyncio.timeout_at(end), self._gate:
                text = await self._fetch(place.url)
            now = self._clock.monotonic()
            readings, at = known[1].read(text, now), now
        except TimeoutError:
            error = f"no answer within {self._deadline_s:g} s"
        except httpx.HTTPStatusError as failure:
            error = f"answered {failure.response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as failure:
            error = str(failure) or type(failure).__name__
        except BadText as failure:
            error = str(failure)
        self.states[place] = SourceState(place.url, at, error, time.perf_counter() - began)
        return readings

    async def _fetch(self, url: str) -> str:
        parts, size = [], 0
        async with self._client.stream("GET", url, timeout=self._deadline_s) as response:
            response.raise_for_status()
            async for part in response.aiter_bytes():
                size += len(part)
                if size > MAX_BYTES:
                    raise BadText(f"is longer than {MAX_BYTES} bytes")
                parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> "Scraper":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
