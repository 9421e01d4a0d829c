"""vLLM's Prometheus text as the few figures that are read, continuous where its counters begin anew."""

from healer.targets.vllm.records import Load

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_GENERATED = "vllm:generation_tokens_total"

LARGEST = 2.0**53
"""Of a count that a float holds exactly."""


def samples(text: str, name: str) -> dict[str, float]:
    """The values of one metric by the `engine` label ("" where there is none); series of one engine are added."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        labels, _, rest = line[len(name) :].rpartition("}") if "}" in line else ("", "", line[len(name) :])
        engine = labels.partition('engine="')[2].partition('"')[0]
        try:
            value = float(rest.split(maxsplit=1)[0])
        except (ValueError, IndexError):
            continue
        if not 0.0 <= value < LARGEST:
            continue  # not a number among them
        found[engine] = found.get(engine, 0.0) + value
    return found


class Meter:
    """Of one rank. A scale-up rebuilds vLLM's loggers, so its counters fall to zero although the engine went on."""

    def __init__(self, total: float = 0.0) -> None:
        self._total, self._last = total, 0.0

    def read(self, text: str, engine: str = "") -> Load | None:
        """None: the text shows no such figures. After a scale-up every API server shows the engines of all; with `engine`
        only that one counts."""
        running, waiting, generated = (samples(text, name) for name in (_RUNNING, _WAITING, _GENERATED))
        if not running or not generated:
            return None
        value = _of(generated, engine)
        self._total += value - self._last if value >= self._last else value
        self._last = value
        return Load(_of(running, engine), _of(waiting, engine), self._total)


def _of(values: dict[str, float], engine: str) -> float:
    return values[engine] if engine in values else sum(values.values())
