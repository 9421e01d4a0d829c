"""Healing inside a running vLLM 0.33 group: a plugin of vLLM, and what the daemon needs to give it orders.

Two halves that never meet in one process:

* inside vLLM's processes: `plugin` (the entry points), `guard` (does this vLLM look as expected?), `engine`, `sentinel`,
  `shrink`, `held`, `groups`, `refill`, `launch`, `api`, and the worker's part in `worker`;
* beside the ranks: `client` and `driver` for the daemon, without torch or vLLM, and `coordination`, a process of its own that
  hosts what stock vLLM hosts in rank 0.

`spare` is a rank before it is one, with or without the plugin.

`records` is shared. This package must not know the `healer` daemon; importing it must import nothing heavy.
"""
