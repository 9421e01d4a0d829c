"""The process that talks to NVML, and nothing else: a driver call that never returns, or that crashes, takes this process
with it and not the daemon.

It is started with a bare interpreter, imports the standard library and pynvml only (nothing of healer: each megabyte here
is one more beside every group) and says what it reads as JSON lines on its standard output; `healer.sensors.nvml.wire`
describes them. It ends, with NVML closed, on SIGTERM or when its standard input ends, so it never outlives the daemon. It
judges nothing: which reading means what is decided in the daemon.
"""
