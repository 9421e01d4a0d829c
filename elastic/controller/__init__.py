"""The controller: membership of slots, the reconfiguration sequences, and the executor that runs one of them at a time.

Runs inside the daemon (or any asyncio program); no torch. Ranks outlive it: a new controller adopts a running group.
"""
