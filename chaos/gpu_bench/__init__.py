"""How fast a group on GPUs heals, and what the alternatives cost: `python -m chaos.gpu_bench`, `make bench-gpu`.

Every time comes from whoever knows it: phases from the executor's reports, committed steps from the ranks' own logs, faults
from the injector's clock; all on the monotonic clock of one host. With `--cpu` the same parts run on a machine without a
GPU, at sizes that prove the harness and nothing else.
"""
