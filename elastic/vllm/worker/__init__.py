"""The worker's part of healing in place: groups, exchange, expert maps and weights of one vLLM worker. See `interface`."""
