"""`spec.lease`, `spec.journal` and `spec.notifications`: the daemon itself."""

from typing import Annotated, Literal

from pydantic import Field

from healer.lease.election import Timing
from healer.notice import About
from healer.notify import Receiver
from healer.policy.schema.base import Count, Duration, Listed, Model, Name, OneOf, PathText
from healer.retention import Retention

_RECEIVER = Receiver(name="", url="")
_KEPT = Retention()


class Lease(Model):
    """Lets several daemons stand by for one group: one of them holds the lease and acts, the others watch and take over."""

    store: Literal["folder", "kubernetes"]
    """Where the lease is kept: a folder that all daemons reach, or a Lease object of the Kubernetes API."""
    folder: PathText | None = None
    """Of store `folder`: on one host, or on a file system that all hosts share."""
    name: Name | None = None
    """Of store `kubernetes`: the Lease object. The service account needs get, create and update on it."""
    namespace: Name | None = None
    """Of store `kubernetes`; absent: the pod's own."""
    ttl_s: Duration = 10.0
    """A standby takes over this long after the holder's last renewal that it saw."""
    renew_s: Duration = 2.0
    """Between two renewals."""
    deadline_s: Duration = 2.0
    """Of one call to the store."""
    margin_s: Duration = 2.0
    """So long before the end of its time a holder that cannot renew stops acting. renew + 2 x deadline must fit into
    ttl - margin: one slow call does not end the lease."""

    @property
    def timing(self) -> Timing:
        return Timing(ttl_s=self.ttl_s, renew_s=self.renew_s, call_deadline_s=self.deadline_s, margin_s=self.margin_s)


class JournalKept(Model):
    """How much the journal remembers. What belongs to the open incident is always kept."""

    keep_incidents: Count = _KEPT.incidents
    """Incidents, each with all its entries."""
    keep_entries: Count = _KEPT.entries
    """Entries that belong to no incident; one takes about 300 bytes."""

    @property
    def retention(self) -> Retention:
        return Retention(incidents=self.keep_incidents, entries=self.keep_entries)


class Notification(Model):
    """A receiver of letters about incidents. A letter is sent again until it is accepted, across restarts of the daemon."""

    name: Name
    """Named in metrics; unique."""
    url: str = ""
    """http or https; either this or `urlFile`."""
    url_file: PathText | None = None
    """A file that holds the address, where the address is a secret (Slack's are). Read at each letter, never logged."""
    format: Literal["json", "alertmanager", "slack"] = "json"
    """What is posted: all fields; alerts for Alertmanager's API v2; a text for Slack and what understands its form."""
    about: Annotated[tuple[Annotated[str, OneOf(tuple(a.value for a in About))], ...], Listed, Field(min_length=1)] = (
        tuple(a.value for a in _RECEIVER.about)
    )
    """What it is told of."""
    template: Annotated[str, Field(min_length=1, max_length=1000)] = _RECEIVER.template
    """Of the text: $about, $deployment, $incident, $cause, $slots, $sentence, $resolved and $wall are filled in."""
    headers_file: PathText | None = None
    """Lines `Name: value` that are sent along; for tokens. Read at each letter, never logged."""
    deadline_s: Duration = _RECEIVER.deadline_s
    """Of one attempt."""
    attempts: Annotated[int, Field(ge=1, le=100)] = _RECEIVER.attempts
    """Then the letter is dead: kept with the reason, and counted. The pauses double from 1s up to 5m."""

    @property
    def receiver(self) -> Receiver:
        return Receiver(
            name=self.name,
            url=self.url,
            url_file=self.url_file or "",
            format=self.format,
            about=tuple(About(one) for one in self.about),
            template=self.template,
            headers_file=self.headers_file or "",
            deadline_s=self.deadline_s,
            attempts=self.attempts,
        )
