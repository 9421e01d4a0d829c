"""What is seen of the ranks, as the events that healer's senses take: a beat for each look that found a rank sound, its loss,
and reports of peers. Pure.

A rank that answers HTTP may still hang: vLLM's /health stays 200 through all of it. So a beat says more than an answer, it says
that the rank generates where it has something to generate. Ranks run every step together, so one that hangs holds all; those
whose own processes are sound then name the ones that are not.
"""

from collections.abc import Collection

from elastic.controller.records import Event, PeerFaultSeen, RankBeat, RankGone
from elastic.protocol import Counters, Heartbeat
from healer.targets.vllm.log_lines import Said, Sign
from healer.targets.vllm.watch import RankWatch


def suspects(ranks: Collection[RankWatch]) -> tuple[int, ...]:
    """Slots whose trouble is seen in themselves, not in what they wait for."""
    return tuple(r.held.slot for r in ranks if not r.alive or r.look is None or not r.look.answers or r.look.dead)


def beats(ranks: Collection[RankWatch], *, epoch: int, phase: str, now: float, scaling: bool) -> list[Event]:
    """Of live ranks, after all have been asked once. `scaling`: their gates may be shut, and nobody is suspected for it."""
    named = suspects(ranks)
    found: list[Event] = []
    for rank in ranks:
        still = rank.still_since(now) is not None and not scaling
        if rank.held.slot in named or (still and not named):
            continue
        load = rank.look.load if rank.look else None
        beat = Heartbeat(
            round=rank.generated,
            phase=phase,
            epoch=epoch,
            idle=rank.idle,
            waiting_on=named if still else (),
            counters=Counters(tokens=rank.generated),
            waiting=int(load.waiting) if load else 0,
            running=int(load.running) if load else 0,
        )
        found.append(RankBeat(rank.held.member, beat, now))
    return found


def reports(rank: RankWatch, signs: Collection[Said], slots: dict[int, int], tensor: int, now: float) -> list[Event]:
    """What a rank's log says of its peers. `slots`: by DP rank; `tensor`: ranks of the exchange for each DP rank."""
    found: dict[tuple[int, Sign], Event] = {}
    for said in signs:
        for peer in said.peers:
            slot = slots.get(peer // tensor)
            if slot is not None and slot != rank.held.slot:
                seen = PeerFaultSeen(rank.held.member, slot, said.sign.value, "ep", now)
                found.setdefault((slot, said.sign), seen)
    return list(found.values())


def gone(rank: RankWatch, now: float) -> RankGone:
    """Its API server, engine, worker or coordinator has ended: in vLLM each of these is the end of the rank, whatever the
    others of them still answer, and with whatever exit code."""
    return RankGone(rank.held.member, "pidfd", "X", now)


def silent(rank: RankWatch, now: float) -> RankGone:
    """Its server takes no connections, or says that its engine is dead. No proof by itself where its process lives."""
    return RankGone(rank.held.member, "socket", "?", now)
