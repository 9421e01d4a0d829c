"""Diagnosis: standing evidence in, one verdict for each live rank, each GPU and the host out. Pure; knows nothing of
policies or actions. The rules, in order; for each subject the first that holds gives the verdict.

A rank (`ranks.py`). Unhealthy, on conclusive evidence:
1. *process-death*: the kernel says that the process is a zombie, gone or exiting (/proc by pid and start time, a pidfd, the
   mutex that its main thread held, or the closed liveness socket with such a state).
2. *stopped*: state T in /proc, read after the silence was noticed, and silence for `stall_after_s`. A stop shorter than
   that, and a debugger's stop (state t), is not one.

Unhealthy, on a quorum of independent sources:
3. *hang*: silence for `stall_after_s`, and at least half of the other ranks (or the only one), each of them heard, wait for
   it within one round for as long, or saw its memory fail within `fault_window_s`.
4. *stuck*: it beats, but its round has not moved for `silent_after_s`, it waits for nobody and has masked nobody since, and
   all other ranks that are heard, and at least half of all, wait for it; and it is no dead link, nor a partition
   (`localise.py`). Or it is cut off: its round has not moved for as long, and it is one of less than half of all ranks, each of
   which waits for more than half of all and they for it, and nobody else waits for anybody (`waits.py`).
   Neither holds within `silent_after_s` after a rank has left the group: what the others waited for is over then.

Unhealthy, by deadline:
5. *agent-lost*: its liveness socket closed although the process is alive, and silence for `stall_after_s`: it can take no
   command.
6. *silent*: silence for `silent_after_s`.
Rules 5 and 6 do not hold while more than half of the ranks not already explained by rules 1 and 2 are silent: then it is
the telemetry that is in doubt.

Unknown, which is neither healthy nor sick. No rank is touched for it; the step of a mutual wait may be run again:
7. *telemetry-lost*: the daemon itself was late; nothing was heard since.
8. *mutual-wait*: it beats, and it and another that beats wait for each other. *suspected*: any weaker sign: shorter
   silence, one witness, a fault report, a closed socket.
9. *unheard*: no beat since it became live.

Healthy: a beat was heard, and nothing stands against it. A healthy verdict with a cause is a warning (*straggler*, *memory*).

A GPU (`gpus.py`):
10. Unhealthy, on conclusive evidence: the driver asks for an action (NVML field 230 of 1 or more, or return code 16), the
    GPU is lost, a fatal poison, a row remap that failed.
11. Unhealthy, on a quorum: two independent sources name grave signs within `quorum_window_s`. Sources are the driver's XIDs,
    whichever way they come, each sensor's readings, and the ranks on the GPU together. Grave are: an XID that the catalogue answers with drain, reset or reboot, uncorrectable
    ECC errors, the SRAM threshold, NVLinks down, the fabric, PCIe errors that were not corrected.
12. Unhealthy, by deadline: such an XID, and the driver has not said for `answer_after_s` what it asks for.
    An XID that it has answered with "none" does not count in rules 11 and 12: field 230 is 0, and was read after the XID,
    or has not changed for `answer_after_s` while the GPU could be read.
13. Unknown: one grave sign alone; an XID that the catalogue does not know or leaves to a human, whatever else there is; no
    reading; back from being lost for less than `probation_s`.
14. Healthy, with a warning: throttling, heat, correctable errors, a pending remap, slow PCIe, XIDs of the application.

The host (`hosts.py`):
15. Unknown while NVML is blind or silent on it, and for `settle_after_s` after it sees again. A kernel log that cannot be
    read is a warning.
16. Unhealthy, on a quorum: all of two or more GPUs are lost, or have no fabric, within `quorum_window_s`.
    Both mute its GPUs: they are unknown, and no rank is condemned through them.

Together (`blame.py`):
17. A rank on an unhealthy GPU is unhealthy with the GPU's cause; one on a suspected GPU is suspected.
18. A rank that died, hangs or is silent is put down to its GPU's XID where that came up to `blame_before_s` earlier or
    `blame_after_s` later; so is a rank that lives but that others complain about. An XID that the catalogue ignores, or does
    not know, is never to blame. An error of an application (XID 31 and its like) explains a death only within
    `blame_after_s`. The death itself is acted upon at once: an XID that comes later refines the incident.
"""

import math
from collections.abc import Collection

from healer.diagnosis.blame import Departed, Refined, join, refine
from healer.diagnosis.gpus import judge_gpus, muting
from healer.diagnosis.hardware import Advice, Hardware, XidAction
from healer.diagnosis.hosts import back_at, judge_hosts
from healer.diagnosis.localise import Finding
from healer.diagnosis.ranks import judge_ranks
from healer.diagnosis.verdict import Cause, Confidence, Diagnosis, Health, Limits, Verdict
from healer.dossier import Standing
from healer.evidence import Evidence, GpuRef, HostRef, RankRef

__all__ = [
    "Advice",
    "Cause",
    "Confidence",
    "Departed",
    "Diagnosis",
    "Finding",
    "Hardware",
    "Health",
    "Limits",
    "Refined",
    "Verdict",
    "XidAction",
    "diagnose",
    "refine",
]

_NO_HARDWARE = Hardware()


def diagnose(
    standing: Collection[Standing],
    live: Collection[RankRef],
    limits: Limits,
    now: float,
    hardware: Hardware = _NO_HARDWARE,
    regrouped_at: float = -math.inf,
) -> Diagnosis:
    """Verdicts for every rank in `live`, for every GPU that is known or named by evidence, and for hosts of which something
    is known. Evidence about or by ranks that are not in `live` is ignored. `now`, and `regrouped_at`, when a rank last left,
    in monotonic seconds."""
    about_ranks: dict[RankRef, list[Evidence]] = {rank: [] for rank in sorted(live)}
    about_gpus: dict[GpuRef, list[Standing]] = {gpu: [] for gpu in hardware.gpus}
    about_hosts: dict[HostRef, list[Standing]] = {}
    for one in standing:
        subject, reporter = one.evidence.subject, one.evidence.reporter
        if isinstance(subject, GpuRef):
            about_gpus.setdefault(subject, []).append(one)
        elif isinstance(subject, HostRef):
            about_hosts.setdefault(subject, []).append(one)
        elif subject in about_ranks and (reporter is None or reporter in about_ranks):
            about_ranks[subject].append(one.evidence)
    ranks, where = judge_ranks(about_ranks, limits, now, regrouped_at)
    if not about_gpus and not about_hosts:
        return Diagnosis(ranks=tuple(ranks.values()), where=where)
    hosts = judge_hosts(about_hosts, about_gpus, hardware.host, limits, now)
    gpus = judge_gpus(about_gpus, about_ranks, hosts, back_at(about_hosts), hardware, limits, now)
    return Diagnosis(
        ranks=join(ranks, about_ranks, gpus, about_gpus, hardware, limits, now, muted=muting(hosts) is not None),
        gpus=tuple(gpus[gpu] for gpu in sorted(gpus, key=lambda g: (g.pci, g.uuid))),
        hosts=tuple(hosts[host] for host in sorted(hosts)),
        where=where,
    )
