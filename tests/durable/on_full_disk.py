"""A whole group on a file system that is full: `unshare -rm python -m tests.durable.on_full_disk CHECKPOINT`, which mounts one.

Ends with exit code 0 and "ok" where the group heals, a new daemon takes it over, and all is well once there is room.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from elastic.client import Traffic, random_prompts
from healer.deployment import Deployment, eventually
from tests.e2e.harness import assert_same, members, send

SIZE = "8m"
BASE = [0, 1, 2]


async def run(checkpoint: Path, place: Path) -> None:
    deployment = Deployment(checkpoint, target={"ranks": 3, "maxRanks": 4, "runDir": str(place / "healer-run")})
    deployment.run_dir = place / "healer-run"
    # by this name its processes are found at the end
    owned = deployment._owns
    deployment._owns = lambda line: owned(line) or any(str(place) in word for word in line)  # type: ignore[method-assign]
    try:
        await deployment.start(240)
        prompts = random_prompts(6, 512, seed=3)
        want = [a.tokens for a in await Traffic(deployment.gateway(), prompts, 48).run()]
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                print(f"full: {error}", flush=True)
        old, traffic = members(deployment), Traffic(deployment.gateway(), prompts, 48)

        async def healed() -> Any:
            found = await deployment.get("/status")
            group = found["group"]
            fresh = group["slots"][1]["member"] and group["slots"][1]["member"]["pid"] != old[1].pid
            return found if fresh and group["live"] == BASE and found["incident"] is None else None

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            send(deployment, [1], signal.SIGKILL)
            found = await eventually(healed, "slot 1 is replaced on a full disk", 120)
        assert_same(traffic.answers, want)
        assert "the journal cannot be written" in found["why"], found["why"]
        ranks = {s["slot"]: s["member"]["pid"] for s in found["group"]["slots"] if s["member"]}
        deployment.kill_daemon()
        (deployment.run_dir / "healer.json").unlink()
        deployment.spawn()

        async def adopted() -> bool | None:
            assert deployment.daemon is not None
            assert deployment.daemon.poll() is None, deployment.log()[-2000:]
            return True if "adopted the running group" in deployment.log() else None

        await eventually(adopted, "the next daemon takes the group over", 60)
        filler.unlink()

        async def well() -> Any:
            found = await deployment.get("/status")
            return found if found["state"] == "ok" and not found["journal"]["error"] else None

        found = await eventually(well, "the daemon is found again and writes its journal", 60)
        assert {s["slot"]: s["member"]["pid"] for s in found["group"]["slots"] if s["member"]} == ranks
        assert_same(await Traffic(deployment.gateway(), prompts, 48).run(), want)
    except BaseException as error:
        error.add_note(deployment.log()[-3000:])
        raise
    finally:
        deployment.end()


def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="full-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], check=True)
    asyncio.run(run(Path(sys.argv[1]), place))
    print("ok", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
