"""Lines that wait until the work is done."""

import asyncio
from datetime import UTC, datetime

from structlog.testing import capture_logs

from healer.logs import SOON_S, LateLog


async def test_a_line_is_written_behind_what_the_loop_has_to_do_with_the_time_at_which_it_was_said() -> None:
    log, turns = LateLog("test"), list[int]()
    with capture_logs() as written:
        log.say("info", "rank.lost", slot=3)
        said_by = datetime.now(UTC)
        log.flush_soon()
        for turn in range(3):
            asyncio.get_running_loop().call_soon(lambda turn=turn: turns.append(len(written)))
        log.say("warning", "rank.refilled")
        # timers are called in the order of their times
        await asyncio.sleep(SOON_S)
    assert turns == [0, 0, 0]
    assert [(line["event"], line["log_level"]) for line in written] == [
        ("rank.lost", "info"),
        ("rank.refilled", "warning"),
    ]
    assert datetime.fromisoformat(written[0]["timestamp"]) <= said_by <= datetime.fromisoformat(written[1]["timestamp"])


async def test_the_end_of_the_process_waits_for_no_timer() -> None:
    log = LateLog("test")
    with capture_logs() as written:
        log.say("error", "daemon.ended")
        log.flush_soon()
        log.flush()
        assert [line["event"] for line in written] == ["daemon.ended"]
        await asyncio.sleep(0)
        log.flush_soon()
        log.flush()
    assert len(written) == 1
