"""What stock vLLM hosts in rank 0, in a process of its own: `python -m elastic.vllm.coordination RUN_DIR`, with vLLM's interpreter.

DP coordinator (a child, vLLM's own), coordination stores, and the handshake that ranks start with. With these outside, rank 0
is as mortal as any other rank, and a slot can be filled again. The daemon starts it, keeps it alive and gives it orders
over a socket in the run directory; it outlives the daemon. Started again it listens at the same addresses. What its stores
held is lost then, which ends the order that was under way, and nothing else.
"""
