"""Questions to single ranks, at their own sockets: their committed steps, their counters, the logits of a prompt."""

import asyncio
import itertools
from array import array
from collections.abc import Collection, Sequence

import msgspec

from elastic.channel import Channel, read_frame
from elastic.errors import ElasticError
from elastic.protocol import (
    Emitted,
    Hello,
    Query,
    Rejected,
    Sampling,
    Status,
    Steps,
    StepsTaken,
    StepTaken,
    Submit,
    Work,
    encode,
)
from elastic.view import Member

ANSWER_S = 10.0
_numbers = itertools.count(1)


class Seen(msgspec.Struct, frozen=True):
    """One rank, at one moment."""

    member: Member
    status: Status
    steps: tuple[StepTaken, ...]
    works: tuple[Work, ...]


async def look(group: str, member: Member, since: float) -> Seen:
    """Raises ElasticError where the rank does not answer."""
    hello = Hello(role="controller", group=group)
    channel = await Channel.open(member.address, hello, f"rank {member.slot}", deadline_s=ANSWER_S)
    channel.start()
    try:
        status = await channel.call(Query(id=channel.next_id()), Status, deadline_s=ANSWER_S)
        steps = await channel.call(Steps(id=channel.next_id(), since=since), StepsTaken, deadline_s=ANSWER_S)
    finally:
        await channel.aclose()
    return Seen(member, status, steps.steps, steps.works)


async def look_at_all(group: str, members: Collection[Member], since: float) -> dict[int, Seen]:
    seen = await asyncio.gather(*(look(group, m, since) for m in members))
    return {one.member.slot: one for one in seen}


async def logits(group: str, member: Member, prompt: list[int], tokens: int) -> tuple[list[int], list[Sequence[float]]]:
    """Greedy tokens of one prompt on exactly this rank, and the logits that each was chosen from. Raises ElasticError."""
    reader, writer = await asyncio.open_unix_connection(member.address)
    try:
        writer.write(encode(Hello(role="gateway", group=group)))
        writer.write(
            encode(
                Submit(
                    request=f"bench-{next(_numbers)}",
                    attempt=1,
                    tokens=tuple(prompt),
                    prompt_len=len(prompt),
                    max_tokens=tokens,
                    sampling=Sampling(),
                    stop_ids=(),
                    logits=True,
                )
            )
        )
        chosen: list[int] = []
        rows: list[Sequence[float]] = []
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await read_frame(reader)
                if isinstance(message, Rejected):
                    raise ElasticError(f"rank {member.slot} refused a prompt: {message.why}")
                if isinstance(message, Emitted):
                    if message.tokens:
                        chosen += message.tokens
                        rows.append(array("f", message.logits))
                    if message.finish is not None:
                        return chosen, rows
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise ElasticError(f"rank {member.slot} gave no logits: {error or 'in time'}") from error
    finally:
        writer.close()
