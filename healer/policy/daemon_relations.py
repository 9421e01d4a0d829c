"""Relations within `spec.lease` and `spec.notifications`."""

from collections.abc import Iterator

from healer.policy.conflict import Contradiction, repeated
from healer.policy.schema import KeyPath, Lease, Policy, is_url

LEASE: KeyPath = ("spec", "lease")
NOTIFICATIONS: KeyPath = ("spec", "notifications")


def daemon_relations(policy: Policy) -> Iterator[Contradiction]:
    if policy.spec.lease is not None:
        yield from _lease(policy.spec.lease)
    receivers = policy.spec.notifications
    yield from repeated([one.name for one in receivers], NOTIFICATIONS)
    for index, one in enumerate(receivers):
        place = (*NOTIFICATIONS, index)
        if one.url and not is_url(one.url):
            text = f"{one.url!r} is no address, expected one that begins with http:// or https://"
            yield Contradiction((*place, "url"), (), text)
        for problem in one.receiver.problems():
            yield Contradiction(place, (), problem)


def _lease(lease: Lease) -> Iterator[Contradiction]:
    needed, others = ("folder", ("name", "namespace")) if lease.store == "folder" else ("name", ("folder",))
    if getattr(lease, needed) is None:
        yield Contradiction((*LEASE, needed), (*LEASE, "store"), f"is missing, which store {lease.store} needs")
    for key in others:
        if getattr(lease, key) is not None:
            yield Contradiction((*LEASE, key), (*LEASE, "store"), f"is not for store {lease.store}, expected it away")
    for problem in lease.timing.problems():
        yield Contradiction((*LEASE, "ttl"), (*LEASE, "renew"), f"{problem}; expected a longer ttl or shorter others")
