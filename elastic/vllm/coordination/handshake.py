"""The handshake of starting engines, as vLLM's rank 0 answers it (v1/engine/utils.py, distributed/elastic_ep/external_elastic_ep.py).

Pure: messages in, messages out. An engine says HELLO, waits up to five minutes for its addresses, and says READY when it has
loaded. Ranks of a group that starts are answered at once. A joiner of a refill is answered when the survivors are told, so
that one that never comes up has touched nobody.
"""

from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True)
class Addresses:
    front_publish: str
    back_output: str
    back_publish: str

    def wire(self) -> dict[str, object]:
        """As vLLM's EngineZmqAddresses; inputs and outputs come from the engine's own API server."""
        return {
            "inputs": [],
            "outputs": [],
            "coordinator_input": self.back_publish,
            "coordinator_output": self.back_output,
            "frontend_stats_publish_address": self.front_publish,
        }


@dataclass(frozen=True)
class Shared:
    """What all engines of a group are told; names of vLLM's ParallelConfig."""

    size: int
    host: str
    port: int
    ports: tuple[int, ...]
    store_port: int

    def wire(self) -> dict[str, object]:
        return {
            "data_parallel_master_ip": self.host,
            "data_parallel_master_port": self.port,
            "_data_parallel_master_port_list": list(self.ports),
            "_coord_store_port": self.store_port,
            "data_parallel_size": self.size,
        }


@dataclass
class Handshake:
    """Of one start or one refill."""

    expected: tuple[int, ...]
    addresses: Addresses
    shared: Shared
    redundant_experts: int | None = None
    """Of a refill; None: a start."""
    max_size: int = 0
    hello: dict[int, bytes] = field(default_factory=dict)
    """ZeroMQ identity by slot."""
    answered: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    trouble: str = ""
    _hash: str = ""

    @property
    def joins(self) -> bool:
        return self.redundant_experts is not None

    @property
    def done(self) -> bool:
        return self.ready >= set(self.expected)

    def on_message(self, identity: bytes, payload: bytes) -> list[tuple[bytes, bytes]]:
        """Replies to send."""
        slot = int.from_bytes(identity, "little")
        try:
            message = msgspec.msgpack.decode(payload, type=dict[str, object])
        except msgspec.MsgspecError as error:
            self.trouble = f"slot {slot}: no handshake of vLLM: {error}"
            return []
        status = message.get("status")
        if slot not in self.expected:
            self.trouble = f"slot {slot} says {status}, expected are slots {list(self.expected)}"
            return []
        if status == "HELLO":
            self.hello[slot] = identity
            return [] if self.joins and slot not in self.answered else self.answer([slot])
        if status == "READY":
            found = str(message.get("parallel_config_hash", ""))
            if self._hash and found != self._hash:
                self.trouble = f"slot {slot} was started with another parallel configuration than the others"
            self._hash = self._hash or found
            self.ready.add(slot)
        return []

    def answer(self, slots: list[int]) -> list[tuple[bytes, bytes]]:
        """To those of the slots that have said HELLO."""
        told: dict[str, object] = {"addresses": self.addresses.wire(), "parallel_config": self.shared.wire()}
        if self.joins:
            told = {
                "engine_metadata": told,
                "num_redundant_experts": self.redundant_experts,
                "elastic_ep_max_dp_size": self.max_size,
            }
        reply = msgspec.msgpack.encode(told)
        self.answered.update(slots)
        return [(self.hello[slot], reply) for slot in slots if slot in self.hello]
