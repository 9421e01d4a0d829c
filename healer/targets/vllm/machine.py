"""The states of a vLLM group under healer, and which event leads from one to the next: a table, and nothing beside it."""

from enum import StrEnum


class State(StrEnum):
    NEW = "new"
    """Nothing has been looked at yet."""
    STARTING = "starting"
    """All ranks are launched together, from nothing."""
    SERVING = "serving"
    GROWING = "growing"
    """Joiners boot, or vLLM prepares or commits."""
    SHRINKING = "shrinking"
    REMOVING = "removing"
    """A rank is dead and ended; the others wait for the instruction to go on without it, or carry it out."""
    HEALING = "healing"
    """The plugin in the ranks makes the groups anew around whoever is left; requests wait in their engines."""
    FILLING = "filling"
    """A joiner boots for an empty slot while the others serve."""
    RETRYING = "retrying"
    """Every engine was told to retry; nobody is trusted before its canaries."""
    RESTARTING = "restarting"
    """The whole group is fenced and launched again."""
    DOWN = "down"
    """Nothing serves, and the last attempt to start has failed; tried again after a pause."""
    YIELDED = "yielded"
    """Another controller changes this group: healer watches, and does nothing until it is started again."""
    CLOSED = "closed"


class Trigger(StrEnum):
    START = "start"
    ADOPT = "adopt"
    STARTED = "started"
    FAILED = "failed"
    """The action has failed with nothing lost: the group serves as before."""
    BROKEN = "broken"
    """The action, or a fault, has left the group in a state that only a restart ends."""
    GROW = "grow"
    SHRINK = "shrink"
    RETRY = "retry"
    REMOVE = "remove"
    HEAL = "heal"
    FILL = "fill"
    DONE = "done"
    OTHER_CONTROLLER = "other-controller"
    CLOSE = "close"


_S, _T = State, Trigger
TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (_S.NEW, _T.START): _S.STARTING,
    (_S.NEW, _T.ADOPT): _S.SERVING,
    (_S.STARTING, _T.STARTED): _S.SERVING,
    (_S.STARTING, _T.FAILED): _S.DOWN,
    (_S.STARTING, _T.BROKEN): _S.RESTARTING,
    (_S.SERVING, _T.GROW): _S.GROWING,
    (_S.SERVING, _T.SHRINK): _S.SHRINKING,
    (_S.SERVING, _T.RETRY): _S.RETRYING,
    (_S.SERVING, _T.REMOVE): _S.REMOVING,
    (_S.SERVING, _T.HEAL): _S.HEALING,
    (_S.SERVING, _T.FILL): _S.FILLING,
    (_S.SERVING, _T.BROKEN): _S.RESTARTING,
    (_S.SERVING, _T.OTHER_CONTROLLER): _S.YIELDED,
    (_S.GROWING, _T.DONE): _S.SERVING,
    (_S.GROWING, _T.FAILED): _S.SERVING,
    (_S.GROWING, _T.BROKEN): _S.RESTARTING,
    (_S.GROWING, _T.OTHER_CONTROLLER): _S.YIELDED,
    (_S.SHRINKING, _T.DONE): _S.SERVING,
    (_S.SHRINKING, _T.FAILED): _S.SERVING,
    (_S.SHRINKING, _T.BROKEN): _S.RESTARTING,
    (_S.SHRINKING, _T.OTHER_CONTROLLER): _S.YIELDED,
    (_S.REMOVING, _T.DONE): _S.SERVING,
    (_S.REMOVING, _T.BROKEN): _S.RESTARTING,
    (_S.HEALING, _T.DONE): _S.SERVING,
    (_S.HEALING, _T.BROKEN): _S.RESTARTING,
    (_S.FILLING, _T.DONE): _S.SERVING,
    (_S.FILLING, _T.FAILED): _S.SERVING,
    (_S.FILLING, _T.BROKEN): _S.RESTARTING,
    (_S.RETRYING, _T.DONE): _S.SERVING,
    (_S.RETRYING, _T.BROKEN): _S.RESTARTING,
    (_S.RESTARTING, _T.STARTED): _S.SERVING,
    (_S.RESTARTING, _T.FAILED): _S.DOWN,
    (_S.RESTARTING, _T.BROKEN): _S.RESTARTING,
    (_S.DOWN, _T.START): _S.RESTARTING,
    (_S.DOWN, _T.BROKEN): _S.RESTARTING,
} | {(state, _T.CLOSE): _S.CLOSED for state in State}
ACTS_NEVER = frozenset({State.YIELDED, State.CLOSED})


class Machine:
    """Holds the state; changed by the target's loop only."""

    def __init__(self) -> None:
        self.state = State.NEW
        self.why = ""

    def move(self, trigger: Trigger, why: str) -> None:
        """Raises ValueError for a change that the table does not have: a bug, never a condition of the group."""
        found = TRANSITIONS.get((self.state, trigger))
        if found is None:
            raise ValueError(f"{trigger} in state {self.state}: {why}")
        self.state, self.why = found, why

    def may(self, trigger: Trigger) -> bool:
        return (self.state, trigger) in TRANSITIONS
