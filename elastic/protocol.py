"""Messages between controller, gateway and rank agents, and their framing.

Frame: 4 bytes big-endian length, then msgpack of one tagged struct. Every command carries the membership epoch; an agent
refuses a command older than its own epoch with `Refused`. A command with `id` gets exactly one answer with the same `id`:
its result, `Refused` or `Failed`. Event messages have no id.
"""

import msgspec

from elastic.placement.maps import Move, Row
from elastic.view import View

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# --- commands: controller to rank -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of any connection; an agent closes a connection that starts otherwise."""

    role: str
    """"controller", "gateway", or "observer": one who may ask a rank how it is and hears what controllers hear, whatever
    their terms, and whose orders are refused."""
    group: str
    version: int = PROTOCOL_VERSION
    term: int = 0
    """Of a controller: that of its lease; 0 without one. Whoever has seen a higher one answers with Refused of id 0 and
    closes. See `elastic.fence`."""


class Query(Message, frozen=True):
    """Answered with Status at any time."""

    id: int


class Adopt(Message, frozen=True):
    """To a spare: become this rank. Answered with Done; from then on the process answers at the rank's own socket."""

    id: int
    slot: int
    incarnation: int


class Steps(Message, frozen=True):
    """Which steps were committed after a moment of the host's monotonic clock? Answered with StepsTaken."""

    id: int
    since: float


class Peer(msgspec.Struct, frozen=True):
    """How to reach another rank's memory."""

    slot: int
    incarnation: int
    ep: bytes
    """Of the EP backend and its round board."""
    weights: bytes


class Prepare(Message, frozen=True):
    """Background work before a commit, while the group serves: know the memory of peers, load weights; a joiner also loads
    its dense weights, warms up and captures. Answered with Prepared."""

    id: int
    epoch: int
    peers: tuple[Peer, ...] = ()
    """Those that weights are to come from."""
    moves: tuple[Move, ...] = ()
    dense_from: int | None = None
    """For a joiner that has no dense weights yet: a live slot to take them from, or -1: host tier or checkpoint."""
    capture: bool = False
    members: dict[int, int] | None = None
    """Incarnations by slot, of those that this rank stays connected to: it lets go of all others first. None: of nobody."""


class Link(Message, frozen=True):
    """Connect the EP back end to peers, masked, while the group serves; after Prepare on all sides. Answered with Done:
    at once, before the work begins, or, with `wait`, when the peers are connected.

    In two steps because NIXL EP meets: each side waits for the other, and the process can do nothing else meanwhile. So
    joiners are sent into it first, and the ranks that serve follow when the joiners are there.
    """

    id: int
    epoch: int
    peers: tuple[Peer, ...]
    wait: bool


class Stage(Message, frozen=True):
    """The next view of a group that serves, to lie ready for `Switch`; after Prepare and Link on all sides. Answered with
    Staged."""

    id: int
    epoch: int
    view: View
    peers: tuple[Peer, ...]
    """All other live ranks, connected before."""
    base: int
    """The number of the next dispatch, agreed by all."""


class StopAt(Message, frozen=True):
    """Stage one of a planned change: stand before `round` unless another order has come by then. Answered at once with Done,
    or with Late when `round` has begun."""

    id: int
    epoch: int
    round: int


class Switch(Message, frozen=True):
    """Stage two, when every rank has accepted the stop before `round`: take over the staged view there and run on. A joiner
    begins with that round. Answered with Committed, when it is done."""

    id: int
    epoch: int
    round: int


class Abort(Message, frozen=True):
    """Unplanned stop: end every wait, discard the step in flight, park. Raises the rank's epoch. Answered with Parked."""

    id: int
    epoch: int
    lost: tuple[int, ...]


class Commit(Message, frozen=True):
    """Take over `view` in place, behind an unplanned stop, or where nobody serves yet. Only to parked ranks and ready
    joiners. Answered with Committed."""

    id: int
    epoch: int
    view: View
    peers: tuple[Peer, ...]
    """All other live ranks; unknown ones are connected first."""
    moves: tuple[Move, ...]
    """Own moves to do before the map changes (coverage after a loss)."""
    round: int
    """The round that the group runs next."""
    base: int
    """The number of the next dispatch, agreed by all."""


class Resume(Message, frozen=True):
    """All ranks have committed: run. Or: a planned change was given up, run on as before. Answered with Done."""

    id: int
    epoch: int


class Leave(Message, frozen=True):
    """The rank is not part of the view any more; end after answering Done."""

    id: int
    epoch: int


# --- answers and events: rank to controller -----------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True):
    """Weights loaded, by source."""

    tensors: int = 0
    bytes: int = 0

    def __add__(self, other: "Source") -> "Source":
        return Source(self.tensors + other.tensors, self.bytes + other.bytes)


class Loaded(msgspec.Struct, frozen=True):
    """What a load moved and from where: peer memory, the host-memory tier, the checkpoint on disk."""

    peer: Source = Source()
    host: Source = Source()
    disk: Source = Source()
    seconds: float = 0.0

    def __add__(self, other: "Loaded") -> "Loaded":
        return Loaded(
            self.peer + other.peer, self.host + other.host, self.disk + other.disk, self.seconds + other.seconds
        )


class Counters(msgspec.Struct, frozen=True):
    captures: int = 0
    replays: int = 0
    address_changes: int = 0
    discarded_steps: int = 0
    tokens: int = 0


class Status(Message, frozen=True):
    """Everything the controller needs to adopt this rank."""

    id: int
    slot: int
    incarnation: int
    pid: int
    pid_start: int
    lifeline: str
    """Path for `elastic.lifeline.watch`; empty where the system has none."""
    epoch: int
    phase: str
    """"booted", "ready" (captured, not in a view), "serving", "parked"."""
    round: int
    """The round that the rank runs next, or is running."""
    view: View | None
    contents: tuple[Row, ...]
    """What the expert buffers hold: [layer][index]; HOLE where empty or torn."""
    peer: Peer
    counters: Counters
    waiting: int
    running: int
    boot_s: dict[str, float] = {}
    """Seconds that this process took, by part, from its start (or, for a spare, from its adoption) to its first answer:
    "process" (interpreter and imports), "device", "exchange", "weights" (memory and its registration), "model"."""
    term: int = 0
    """The highest term of a controller that this rank has seen."""


class SpareStatus(Message, frozen=True):
    """What a spare answers to Query."""

    id: int
    number: int
    pid: int
    pid_start: int
    slots: tuple[int, ...]
    """The slots that it may take: those of its GPU, or all. The first is the one that it has opened its exchange for."""
    boot_s: dict[str, float] = {}
    """As in `Status`, from the process's start."""


class StepTaken(msgspec.Struct, frozen=True, array_like=True):
    """One committed step of a rank."""

    end: float
    """When it had returned."""
    epoch: int
    """Of the view under which it ran."""
    build_s: float
    """From the begin of the round until the step is launched: to put its rows together."""
    launch_s: float
    wait_s: float
    """From the launch until the device, and so every peer, has done its part."""
    settle_s: float
    """Behind its end: choosing tokens, committing, handing out what was chosen."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """What another thread of a rank did."""

    what: str
    begin: float
    end: float


class StepsTaken(Message, frozen=True):
    """The newest only, where there were more than a rank keeps."""

    id: int
    steps: tuple[StepTaken, ...]
    """Ascending."""
    works: tuple[Work, ...] = ()
    """What may have held steps up; those that ended after the moment."""


class Prepared(Message, frozen=True):
    id: int
    loaded: Loaded
    contents: tuple[Row, ...]
    connect_s: float
    capture_s: float


class Parked(Message, frozen=True):
    id: int
    round: int
    """The round that this rank runs next: the first that is not committed here."""
    contents: tuple[Row, ...]
    released_s: float = 0.0
    """From the order to the moment when the step in flight had returned; 0.0 where none was."""


class Staged(Message, frozen=True):
    id: int
    placement_hash: str


class Late(Message, frozen=True):
    id: int
    round: int
    """The round that has begun."""


class Committed(Message, frozen=True):
    id: int
    placement_hash: str
    loaded: Loaded
    contents: tuple[Row, ...]


class Done(Message, frozen=True):
    id: int


class Refused(Message, frozen=True):
    """The command does not fit the rank's epoch or phase; nothing was changed. With id 0: the connection is refused, or
    ended, because a controller of a higher term has come."""

    id: int
    epoch: int
    why: str


class Failed(Message, frozen=True):
    """The command was begun and failed."""

    id: int
    why: str
    unreachable: tuple[int, ...] = ()
    """The peers at which it failed: they gave this rank no answer."""


class Heartbeat(Message, frozen=True):
    """Sent by the agent's own thread every `heartbeat_s`."""

    round: int
    phase: str
    epoch: int
    idle: bool
    waiting_on: tuple[int, ...]
    """The peers that the current step waits for, at the moment of sending."""
    counters: Counters
    waiting: int
    running: int


class Fault(Message, frozen=True):
    """The rank saw a peer fail: evidence for the controller."""

    peer: int
    what: str
    """"timeout", "disconnect"."""
    source: str
    """"ep", "weights"."""


class Resumed(Message, frozen=True):
    """The first step after a commit was committed on this rank (or it went idle at once)."""

    epoch: int
    pause_s: float
    """Longest gap between two committed steps around the commit; 0.0 where the rank was idle before it."""
    idle: bool


# --- gateway and rank -----------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True):
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """With the position it determines the draw: a replayed request continues as it would have."""


class Submit(Message, frozen=True):
    """Gateway to rank. `tokens` is the prompt and what was already sent to the client."""

    request: str
    attempt: int
    tokens: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    """Answer tokens in all, those in `tokens` included."""
    sampling: Sampling
    stop_ids: tuple[int, ...]
    logits: bool = False
    """Send the logits of each token along: for measurements."""


class Cancel(Message, frozen=True):
    """Gateway to rank: forget a request; no answer."""

    request: str
    attempt: int


class Emitted(Message, frozen=True):
    """Rank to gateway: tokens of a committed step; first of all, without tokens, that it has taken the request."""

    request: str
    attempt: int
    start: int
    """Answer index of tokens[0]: the gateway accepts only what continues its ledger."""
    tokens: tuple[int, ...]
    finish: str | None = None
    """"stop", "length", or None while it goes on."""
    logits: bytes = b""
    """float32, [len(tokens), vocab], where the request asked for them."""
    queued_s: float = 0.0
    """With the first token of an attempt: how long the rank had the request before the step in which it got a KV sequence."""


class Rejected(Message, frozen=True):
    """Rank to gateway: a request that can never run here (too long)."""

    request: str
    attempt: int
    why: str


class Load(Message, frozen=True):
    """Rank to gateway, when it changes."""

    waiting: int
    running: int
    max_seqs: int


class Route(msgspec.Struct, frozen=True):
    """A rank as the gateway sees it."""

    slot: int
    incarnation: int
    address: str
    admit: bool
    """False: finish nothing new here; its requests are handed over to others."""


class Routes(Message, frozen=True):
    """Controller to gateway: the ranks that serve. Answered with GatewayStatus."""

    id: int
    epoch: int
    routes: tuple[Route, ...]


class GatewayQuery(Message, frozen=True):
    id: int


class GatewayStatus(Message, frozen=True):
    id: int
    accepted: int
    completed: int
    failed: int
    replayed: int
    """Requests moved to another rank, each time counted."""
    in_flight: int
    queued: int
    per_slot: dict[int, int]
    """Requests in flight by slot."""
    epoch: int = -1
    """Of the routes in force, -1 before any; older ones are refused, so a controller that adopts the group goes on from
    here at least."""
    term: int = 0
    """The highest term of a controller that the gateway has seen."""


AnyMessage = (
    Hello | Query | Adopt | Steps | Prepare | Link | Stage | StopAt | Switch | Abort | Commit | Resume | Leave | Status
    | SpareStatus | StepsTaken | Prepared | Staged | Parked | Late | Committed | Done | Refused | Failed | Heartbeat | Fault
    | Resumed | Submit | Cancel | Emitted | Rejected | Load | Routes | GatewayQuery | GatewayStatus
)  # fmt: skip

Command = (
    Query | Adopt | Steps | Prepare | Link | Stage | StopAt | Switch | Abort | Commit | Resume | Leave | Routes | GatewayQuery
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One frame, length included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes | memoryview) -> AnyMessage:
    """The body of one frame. Raises msgspec.ValidationError or DecodeError on anything else."""
    return _decoder.decode(body)
