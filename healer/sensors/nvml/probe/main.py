"""Start and end of the probe process. The main thread makes no driver call: it can always be heard and always ends."""

import json
import os
import resource
import select
import signal
import sys
import threading
import time

BEAT_S = 0.5
CLOSE_S = 1.0
"""For the threads to come back from their calls, and again for closing NVML."""


def main() -> None:
    """One argument: {"periods_s": {"fast", "medium", "slow"}, "search_s", "events"} as JSON."""
    from .output import Output
    from .watch import Watch

    stopping = threading.Event()
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(waker)
    threading.stack_size(256 << 10)
    output = Output(sys.stdout.fileno())

    def crashed(failure: threading.ExceptHookArgs) -> None:
        output.say("failed", call=f"{failure.exc_type.__name__}: {failure.exc_value}", code=-1)
        os._exit(1)

    threading.excepthook = crashed
    watch = Watch(json.loads(sys.argv[1]), output, stopping)
    thread = threading.Thread(target=watch.run, name="watch", daemon=True)
    thread.start()
    while not watch.over.is_set():
        now = time.monotonic()
        busy = [[g.uuid, g.group, now - began] for g in list(watch.gpus.values()) if (began := g.began) is not None]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        output.say("beat", cpu_s=usage.ru_utime + usage.ru_stime, busy=busy)
        if select.select([sys.stdin, awake], [], [], BEAT_S)[0] or output.gone:
            break  # SIGTERM, or the daemon is gone
    stopping.set()
    for gpu in list(watch.gpus.values()):
        gpu.poke()
    thread.join(CLOSE_S)
    if watch.open:
        import pynvml

        closing = threading.Thread(target=pynvml.nvmlShutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
    output.say("bye")
    os._exit(0)  # a thread that is stuck in the driver would hold an ordinary end up for ever
