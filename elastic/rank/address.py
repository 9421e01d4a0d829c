"""What a rank tells its peers, through the controller, about how to reach it."""

import msgspec

from elastic.errors import ElasticError


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Travels as `protocol.Peer.ep`; opaque to the controller."""

    exchange: bytes
    """For `EpBackend.connect`."""
    lifeline: str
    """For `elastic.lifeline.watch`; empty where the rank has none."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes, slot: int) -> "Address":
        """Raises ElasticError for anything else than an address."""
        try:
            return msgspec.msgpack.decode(raw, type=cls)
        except msgspec.MsgspecError as error:
            raise ElasticError(f"the address of slot {slot} is malformed: {error}") from error
