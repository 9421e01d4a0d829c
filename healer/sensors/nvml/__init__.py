"""NVIDIA's management library as a sensor.

`probe/` is the process that makes the driver calls; `child` and `keeper` run it; `wire` is what it says; `track`, `rules`
and `counters` turn that into something worth telling, GPU by GPU; `sensor` is the sensor. The daemon itself never loads the
library.
"""

from healer.sensors.nvml.config import NvmlConfig
from healer.sensors.nvml.sensor import NvmlSensor

__all__ = ["NvmlConfig", "NvmlSensor"]
