"""Who may give orders: the bearer token, and how often a wrong one may be tried."""

import hmac
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from elastic.errors import ElasticError

MIN_TOKEN_CHARS = 16
FAILURES, WINDOW_S = 5, 60.0
"""A client that has sent so many wrong tokens within the window is not listened to until it is over."""
MAX_CLIENTS = 1000


def read_token(path: str | None) -> bytes | None:
    """The token that control calls need; None: none. Raises ElasticError naming the file."""
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ElasticError(f"{path}: the token file cannot be read: {error.strerror}") from error
    if len(token) < MIN_TOKEN_CHARS:
        raise ElasticError(f"{path}: the token has {len(token)} characters, expected at least {MIN_TOKEN_CHARS}")
    return token


class Guard:
    """Owned by the API. Memory is bounded: the client longest not heard of is forgotten first."""

    def __init__(self, token: bytes | None, monotonic: Callable[[], float]) -> None:
        self._token, self._monotonic = token, monotonic
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def admit(self, request: Request) -> None:
        """Raises HTTPException: 401 for a wrong token, 429 for one of too many."""
        if self._token is None:
            return
        client, now = request.client.host if request.client else "", self._monotonic()
        failures = self._failures.get(client, deque())
        while failures and now - failures[0] > WINDOW_S:
            failures.popleft()
        if len(failures) >= FAILURES:
            wait_s = max(1, round(WINDOW_S - (now - failures[0])))
            text = f"too many wrong tokens from {client}; try again in {wait_s} s"
            raise HTTPException(429, text, {"Retry-After": str(wait_s)})
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # both compared in any case, so that the time taken tells nothing
        right = hmac.compare_digest(given.strip().encode(), self._token)
        if scheme.lower() == "bearer" and right:
            return
        failures.append(now)
        self._failures[client] = failures
        self._failures.move_to_end(client)
        if len(self._failures) > MAX_CLIENTS:
            self._failures.popitem(last=False)
        raise HTTPException(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})
