"""Expert-parallel communication between ranks; `base` has the interface that the round loop knows."""
