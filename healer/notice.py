"""What is told to people: one notice each."""

from enum import StrEnum

import msgspec


class About(StrEnum):
    """What a notice is about; receivers choose."""

    INCIDENT_OPENED = "incident-opened"
    INCIDENT_CLOSED = "incident-closed"
    HUMAN_NEEDED = "human-needed"
    ACTED = "acted"
    BREAKER_OPENED = "breaker-opened"
    QUARANTINED = "quarantined"
    POLICY_REJECTED = "policy-rejected"
    LEASE_LOST = "lease-lost"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell. Holds no secrets: it is kept in the journal."""

    about: About
    deployment: str
    incident: str = ""
    cause: str = ""
    slots: tuple[int, ...] = ()
    sentence: str
    resolved: bool = False
    """True: what an earlier notice of the same incident told is over."""
    wall: float
