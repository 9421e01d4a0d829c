"""Expert-parallel communication between ranks; `base` has the interface that the round loop knows."""

from elastic.rank.comm.factory import open_backend

__all__ = ["open_backend"]
