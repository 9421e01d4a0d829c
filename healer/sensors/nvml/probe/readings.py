"""What is read from one GPU, group by group. Each call's return code is looked at, and inside `GetFieldValues` each
value's own: a field that is not supported comes back as 0 in a call that succeeds.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pynvml as nv

Values = dict[str, int]

OFF_CODES = frozenset({nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_NO_PERMISSION, nv.NVML_ERROR_FUNCTION_NOT_FOUND})
"""These will be the same the next time: the reading is not asked for again."""

_RECOVERY_ACTION, _PCIE_REPLAYS = 230, 94
_CLOCK_EVENTS = {269: "thermal_sw_ns", 270: "thermal_hw_ns", 271: "power_brake_ns"}
_LINK_ERRORS = {161: "nvlink_replays", 162: "nvlink_recoveries", 208: "nvlink5_errors", 215: "nvlink5_recoveries"}
"""By link (scope). 161 and 162 up to Hopper, 208 and 215 from Blackwell."""
_MAX_LINKS = 18
_NOT_AVAILABLE = 2**64 - 1


class Readings:
    """One GPU's. `codes` has the failures of the group that is being read, by call."""

    def __init__(self, handle: Any) -> None:
        self.codes: dict[str, int] = {}
        self.processes: list[list[int | None]] | None = None
        self.newly_off: list[tuple[str, int]] = []
        self._handle = handle
        self._off: set[str] = set()
        self._links: int | None = None

    def take(self, group: str) -> Values:
        self.codes, self.processes, self.newly_off = {}, None, []
        return {"fast": self._fast, "medium": self._medium, "slow": self._slow}[group]()

    def _ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where there is none; why is then in `codes` or `newly_off`."""
        if name in self._off:
            return None
        try:
            return call(self._handle, *arguments)
        except nv.NVMLError as error:
            self._failed(name, error.value)
            return None

    def _failed(self, name: str, code: int) -> None:
        if code in OFF_CODES:
            self._off.add(name)
            self.newly_off.append((name, code))
        else:
            self.codes[name] = code

    def _fields(self, asked: Iterable[tuple[str, int, int]]) -> Values:
        """`asked`: name, field, scope. Values of the same name are added up, over those scopes that answer."""
        wanted = [each for each in asked if f"field {each[1]}" not in self._off]
        if not wanted:
            return {}
        try:
            got = nv.nvmlDeviceGetFieldValues(self._handle, [(field, scope) for _, field, scope in wanted])
        except nv.NVMLError as error:
            # which of the fields is at fault is not known: none of them is switched off
            self.codes[f"fields {wanted[0][1]}"] = error.value
            return {}
        found: Values = {}
        for (name, field, _), value in zip(wanted, got, strict=True):
            if value.nvmlReturn == nv.NVML_SUCCESS:
                found[name] = found.get(name, 0) + _number(value)
            elif f"field {field}" not in self._off:
                self._failed(f"field {field}", value.nvmlReturn)
        return found

    def _fast(self) -> Values:
        values = self._fields([("recovery_action", _RECOVERY_ACTION, 0)])
        if f"field {_RECOVERY_ACTION}" in self._off:
            # any call that reaches the driver shows a lost GPU
            values |= self._one("temperature_c", nv.nvmlDeviceGetTemperature, nv.NVML_TEMPERATURE_GPU)
        return values

    def _one(self, name: str, call: Callable[..., Any], *arguments: Any) -> Values:
        answer = self._ask(name, call, *arguments)
        return {} if answer is None else {name: int(answer)}

    def _medium(self) -> Values:
        values = self._ecc()
        values |= self._fields((name, field, 0) for field, name in _CLOCK_EVENTS.items())
        values |= self._one("clock_reasons", nv.nvmlDeviceGetCurrentClocksEventReasons)
        values |= self._one("temperature_c", nv.nvmlDeviceGetTemperature, nv.NVML_TEMPERATURE_GPU)
        values |= self._one("slowdown_c", nv.nvmlDeviceGetTemperatureThreshold, nv.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        memory = self._ask("memory", nv.nvmlDeviceGetMemoryInfo)
        if memory is not None:
            values |= {"memory_used": memory.used, "memory_total": memory.total}
        rates = self._ask("utilization", nv.nvmlDeviceGetUtilizationRates)
        if rates is not None:
            values["utilization"] = rates.gpu
        values |= self._one("pcie_width", nv.nvmlDeviceGetCurrPcieLinkWidth)
        values |= self._one("pcie_width_max", nv.nvmlDeviceGetMaxPcieLinkWidth)
        values |= self._one("pcie_gen", nv.nvmlDeviceGetCurrPcieLinkGeneration)
        values |= self._one("pcie_gen_max", nv.nvmlDeviceGetMaxPcieLinkGeneration)
        running = self._ask("processes", nv.nvmlDeviceGetComputeRunningProcesses)
        if running is not None:
            self.processes = [[each.pid, each.usedGpuMemory] for each in running]
        return values

    def _ecc(self) -> Values:
        values: Values = {}
        for kind, error in (
            ("cor", nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("unc", nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            for life, counter in (("volatile", nv.NVML_VOLATILE_ECC), ("aggregate", nv.NVML_AGGREGATE_ECC)):
                for place, where in (("dram", nv.NVML_MEMORY_LOCATION_DRAM), ("sram", nv.NVML_MEMORY_LOCATION_SRAM)):
                    name = f"ecc_{kind}_{life}_{place}"
                    values |= self._one(name, nv.nvmlDeviceGetMemoryErrorCounter, error, counter, where)
        status = nv.c_nvmlEccSramErrorStatus_v1_t()
        if self._ask("sram_threshold", nv.nvmlDeviceGetSramEccErrorStatus, nv.byref(status)) is not None:
            values["sram_threshold"] = status.bThresholdExceeded
        rows = self._ask("remapped_rows", nv.nvmlDeviceGetRemappedRows)
        if rows is not None:
            values |= dict(zip(("remap_cor", "remap_unc", "remap_pending", "remap_failed"), rows, strict=True))
        return values

    def _slow(self) -> Values:
        values = self._fields([("pcie_replays", _PCIE_REPLAYS, 0)])
        values |= self._link_states()
        if self._links:
            values |= self._fields(
                (name, field, link) for field, name in _LINK_ERRORS.items() for link in range(self._links)
            )
        fabric = nv.c_nvmlGpuFabricInfo_v3_t()
        if self._ask("fabric", nv.nvmlDeviceGetGpuFabricInfoV, nv.byref(fabric)) is not None:
            values |= {
                "fabric_state": fabric.state,
                "fabric_status": fabric.status,
                "fabric_health": fabric.healthMask,
                "fabric_summary": fabric.healthSummary,
            }
        return values

    def _link_states(self) -> Values:
        """How many links are active, of how many. A count with a hole in it is no count: one link that cannot be read
        leaves all of them out."""
        states: list[int] = []
        for link in range(_MAX_LINKS if self._links is None else self._links):
            if "nvlink_state" in self._off:
                return {}
            try:
                states.append(nv.nvmlDeviceGetNvLinkState(self._handle, link))
            except nv.NVMLError as error:
                if error.value == nv.NVML_ERROR_INVALID_ARGUMENT:
                    break
                self._failed("nvlink_state", error.value)
                return {}
        self._links = len(states)
        return {"nvlinks_active": sum(map(bool, states)), "nvlinks": len(states)} if states else {}


def _number(value: Any) -> int:
    """The member of the union that the value's type says."""
    member = {
        nv.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nv.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nv.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nv.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nv.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        nv.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }.get(value.valueType, "ullVal")
    return int(getattr(value.value, member))
