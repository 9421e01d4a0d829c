"""The daemon: it gathers evidence, judges ranks, decides by a policy, and drives a target back to health.

Small and quick to start: nothing here imports torch or numpy. It must not know how a target moves experts or parks ranks;
that is the executor's work, reached only through `healer.targets`.
"""

__version__ = "0.1.0"
