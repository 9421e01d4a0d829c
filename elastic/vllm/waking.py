"""A coordinator that was started again knows no wave, and what its predecessor was told and did not pass on is lost. So it calls all
engines once, with an index that no engine has: whoever is idle joins at the wave where it stands, which is that of all others.
If nobody has work, this wave ends at once."""

# mypy: disable-error-code="import-not-found, import-untyped"
import functools
from typing import Any

WAKE = -1
"""In the place of the engine that started a wave. Stock vLLM takes the call for one with an old number, and ignores it."""


def install() -> None:
    """May be called again. The guard has compared what is replaced here."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    stock = DPEngineCoreProc._handle_client_request
    if getattr(stock, "healer_installed", False):
        return

    @functools.wraps(stock)
    def handle(self: Any, request_type: Any, request: Any) -> None:
        if request_type == EngineCoreRequestType.START_DP_WAVE and request[1] == WAKE:
            request = (self.current_wave, WAKE)
        stock(self, request_type, request)

    handle.healer_installed = True  # type: ignore[attr-defined]
    DPEngineCoreProc._handle_client_request = handle
