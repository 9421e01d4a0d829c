"""What a server sent that may be anything: the errors that reading it can meet, and a body read within bounds."""

import httpx
import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Of JSON. The last one: a few kB of brackets are deep enough for it."""


class TooLong(Exception):
    """A body above its limit."""


async def read_answer(response: httpx.Response, max_bytes: int) -> bytes:
    """Undecoded, since a compressed body may be a thousand times what was sent: ask for `identity`. Raises TooLong."""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > max_bytes:
            raise TooLong(f"the answer is longer than {max_bytes} bytes")
    return bytes(body)
