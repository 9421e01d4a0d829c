"""What the driver's own words about an XID say beside its code."""

import re

_RECOVERY = re.compile(r"recovery action changed from .* to (?:0x)?([0-9a-f]{1,8})", re.IGNORECASE)


def recovery_action(detail: str) -> int | None:
    """The action that the driver's line of XID 154 names, as in NVML field 230; None where it names none."""
    found = _RECOVERY.search(detail)
    return int(found[1], 16) if found else None
