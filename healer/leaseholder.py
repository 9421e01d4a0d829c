"""The lease of the policy, held or waited for by this process."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from elastic.paths import states_by_term
from healer.authority import Authority
from healer.lease import LeaseStore
from healer.lease.election import Role
from healer.lease.keeper import Keeper
from healer.policy.schema import Lease
from healer.status import LeaseStatus


class Leaseholder(contextlib.AbstractContextManager["Leaseholder"]):
    """Keeps the lease from `__enter__` to `__exit__`, which gives it back."""

    def __init__(self, lease: Lease, run_dir: Path) -> None:
        """`run_dir`: has the state files of earlier terms. Raises ElasticError where the store cannot be used."""
        self._store = _store(lease)
        self._name = str(self._store)
        self._on_loss: Callable[[], None] = lambda: None
        # the ranks remember, so a store that was emptied must not begin anew
        floor = max(states_by_term(run_dir), default=0)
        self._keeper = Keeper(self._store, lease.timing, self._changed, floor=floor)

    def __enter__(self) -> "Leaseholder":
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()

    def armed(self) -> bool:
        return self._keeper.armed()

    def authority(self, on_loss: Callable[[], None]) -> Authority:
        """To act under the term that is held now, and under no later one. `on_loss` is called in another thread."""
        term = self._keeper.term
        self._on_loss = on_loss
        return Authority(term, lambda: self._keeper.term == term and self._keeper.armed())

    def status(self) -> LeaseStatus:
        keeper, role = self._keeper, self._keeper.role
        return LeaseStatus(
            store=self._name,
            name=keeper.name,
            role=role,
            # what was read last may be older than one's own first write
            holder=keeper.name if role is Role.HOLDER else keeper.holder,
            term=keeper.term,
            error=keeper.error,
        )

    def _changed(self, role: Role) -> None:
        if role is not Role.HOLDER:
            self._on_loss()


def _store(lease: Lease) -> LeaseStore:
    if lease.store == "folder":
        from healer.lease.folder import FolderStore

        return FolderStore(Path(lease.folder or ""))
    from healer.lease.kubernetes import KubernetesStore  # brings an HTTP client

    return KubernetesStore(lease.name or "", namespace=lease.namespace)
