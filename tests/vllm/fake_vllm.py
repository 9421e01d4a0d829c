"""A command `vllm serve` for tests: the processes, signals, sockets and answers of vLLM 0.33 with external load balancing, without
an engine behind. Ranks of one group meet in the folder FAKE_VLLM: who is there, what is asked, and `faults/NAME` or
`faults/NAME_RANK`, which a test makes and removes:

    hang        completions wait         wrong       other tokens             abort       200 with finish_reason abort
    unhealthy   fault status unhealthy   stale       retry says healthy, and answers wrongly
    late        as stale, from the second answer on; mute: as stale, and answers nothing
    wedged      503 "scaling" for ever   half        retry leaves this rank unhealthy
    no_boot     ends at start            refuse      400 for a scaling        fail        the commit fails, gates stay shut
    late_drain  as fail, with status 408
    stuck_commit  a fault within the commit, told in the log only; it never ends
    deaf        closes its port when its engine dies, and ignores SIGTERM

With a file `pr46370` among them the ranks speak fault tolerance as pull request 46370 has it, and hold its rules: `broken_rules`
names those that were not kept. `cannot_remove` lets `scale_down` fail, `hang_remove` never end.

Started with HEALER_COORDINATION=1 they have the routes of healer's plugin too, with rules of their own among `broken_rules`:

    vote_no     orders fail on this rank      stock       the plugin is not in force      bad_joiner  the joiner ends in its preparation
    no_commit   the commit of a refill fails  slow_order  an order is not carried out before this is removed
"""

# ruff: noqa: ASYNC110, ASYNC251
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

DIR = Path(os.environ["FAKE_VLLM"])
OPTIONS = {
    sys.argv[i].removeprefix("--"): sys.argv[i + 1] for i in range(2, len(sys.argv) - 1) if sys.argv[i][:2] == "--"
}
RANK, PORT = int(OPTIONS["data-parallel-rank"]), int(OPTIONS["port"])
JOINS = os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH") == "1"
FILLS, PLUGIN = os.environ.get("HEALER_REFILL") == "1", os.environ.get("HEALER_COORDINATION") == "1"
SLEEP = ["-S", "-E", "-c", "import time; time.sleep(1e6)"]


def fault(name: str) -> bool:
    return (DIR / "faults" / name).exists() or (DIR / "faults" / f"{name}_{RANK}").exists()


def put(path: str, value: object) -> None:
    file = DIR / path
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{RANK}")
    part.write_text(json.dumps(value))
    part.replace(file)


def get(path: str, default: object = None) -> object:
    try:
        return json.loads((DIR / path).read_text())
    except (OSError, ValueError):
        return default


def state_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text[text.rindex(")") + 2]


class Rank:
    def __init__(self) -> None:
        self.size = int(OPTIONS["data-parallel-size"])
        if fault("no_boot"):
            print("RuntimeError: injected at start")
            raise SystemExit(1)
        self.children = [self.child(f"VLLM::EngineCore_DP{RANK}"), self.child(f"VLLM::Worker_DP{RANK}")]
        if RANK == 0:
            self.child("VLLM::DPCoordinator")
        self.running = 0
        self.generated = 0
        self.gate = ""
        self.scaling = {"is_scaling_elastic_ep": False, "phase": "idle", "epoch": None, "error": None}
        self.scaling["requested_data_parallel_size"] = None
        self.closing = asyncio.Event()
        self.retried, self.answers = False, 0
        self.unhealthy, self.removed = False, set[int]()
        self.last: dict[str, str] = {}
        self.epoch = 0

    def child(self, title: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([title, *SLEEP], executable=sys.executable)

    @property
    def engine(self) -> int:
        return self.children[0].pid

    def others(self) -> list[str]:
        """States of all engines of the group."""
        if PLUGIN and RANK not in self.live:
            return []
        there = (r for r in range(self.size) if r not in self.removed)
        return [state_of(int(str(get(f"ranks/{r}", 0)))) for r in there]

    @property
    def live(self) -> list[int]:
        """By the plugin's last order that all have carried out."""
        return [r for r in range(self.size) if r not in self.removed]

    def sick(self) -> bool:
        return (any(s in "ZX" for s in self.others()) and bool(self.running)) or fault("unhealthy")

    async def in_place(self, path: str, body: object) -> tuple[int, object]:
        if fault("stock"):
            return 503, {"error": {"message": "not in force: this is another vLLM", "code": 503}}
        if path == "":
            engine = {
                "slot": RANK,
                "size": self.size,
                "live": self.live,
                "epoch": self.epoch,
                "fault": "",
                "phase": None,
            }
            engine |= {"status": "unhealthy" if self.sick() else "healthy", "refill": "", "refill_error": "", "wave": 1}
            engine |= {"running": self.running, "waiting": 0, "max_size": 4, "redundant_experts": 8}
            return 200, {"schema": 1, "state": "ready", "reason": "", "vllm": "0.33.0", "engine": engine}
        assert isinstance(body, dict)
        epoch, self.epoch = self.epoch, max(self.epoch, body["epoch"])
        answer = {"epoch": body["epoch"], "slot": RANK, "phase": "serve", "serves": True, "ok": True}
        if path == "/shrink":
            return await self.order(epoch, body, answer)
        if path == "/refill/prepare":
            put(f"eep/{RANK}", body["epoch"])
        if path == "/refill/commit":
            if fault("no_commit"):
                return 409, answer | {"ok": False, "detail": "injected"}
            self.removed -= {int(r) for r in self.removed if get(f"eep/{r}") == body["epoch"]}
            put(f"committed_refill/{body['epoch']}", self.live)
        return 200, answer

    async def order(self, epoch: int, body: dict, answer: dict) -> tuple[int, object]:
        gone = [r for r in self.live if r not in body["survivors"]]
        alive = [r for r in gone if state_of(int(str(get(f"ranks/{r}", 0)))) not in "ZX"]
        if alive or RANK in gone:
            put(f"broken_rules/{RANK}", f"ranks {alive} live, and are left out")
        if body["epoch"] <= epoch:
            return 409, answer | {"serves": False, "phase": "park", "refused": "stale"}
        put(f"orders/{body['epoch']}/{RANK}", body["survivors"])
        while fault("slow_order"):
            await asyncio.sleep(0.02)
        end = time.monotonic() + body["timeout_s"]
        while any(get(f"orders/{body['epoch']}/{r}") != body["survivors"] for r in body["survivors"]):
            await asyncio.sleep(0.02)
            if time.monotonic() > end:
                return 200, answer | {"serves": False, "phase": "meet", "detail": "not all came"}
        if (DIR / "faults/vote_no").exists() or any((DIR / f"faults/vote_no_{r}").exists() for r in body["survivors"]):
            return 200, answer | {
                "serves": False,
                "phase": "workers" if fault("vote_no") else "vote",
                "detail": "injected",
            }
        self.removed |= set(gone)
        (DIR / f"faults/unhealthy_{RANK}").unlink(missing_ok=True)
        return 200, answer

    async def generate(self, body: dict) -> tuple[int, object]:
        self.running += 1
        try:
            while (
                fault("hang")
                or (self.retried and fault("mute"))
                or self.unhealthy
                or any(s in "TtZX" for s in self.others())
            ):
                if fault("pr46370") and not self.unhealthy and any(s in "ZX" for s in self.others()):
                    self.unhealthy = True
                    return 200, {"choices": [{"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}]}
                await asyncio.sleep(0.02)
            prompt, count = body["prompt"], body["max_tokens"]
            start = zlib.crc32(bytes(str(list(prompt[:16])), "ascii"))
            self.answers += self.retried
            bend = fault("wrong") or (self.retried and fault("stale")) or (self.answers > 1 and fault("late"))
            ids = [2 + (start + at + bend) % 90 for at in range(count)]
            finish = "length"
            if fault("abort"):
                ids, finish = ids[:1], "abort"
            self.generated += len(ids)
            choice = {"index": 0, "text": "x", "finish_reason": finish, "token_ids": ids}
            return 200, {"choices": [choice]}
        finally:
            self.running -= 1

    async def scale(self, size: int) -> tuple[int, object]:
        if fault("refuse") or size > 4:
            return 400, {"error": {"message": "cannot", "type": "Bad Request", "param": None, "code": 400}}
        epoch = f"{int(get('epochs', 0)) + 1:x}" if RANK == 0 else None  # type: ignore[call-overload]
        put(f"posts/{size}/{RANK}", 1)
        while epoch is None:
            epoch = get(f"posts/{size}/epoch")  # type: ignore[assignment]
            await asyncio.sleep(0.01)
        put(f"posts/{size}/epoch", epoch)
        self.scaling |= {"is_scaling_elastic_ep": True, "phase": "preparing", "epoch": epoch}
        self.scaling |= {"requested_data_parallel_size": size, "error": None}
        need = [f"posts/{size}/{r}" for r in range(self.size)] + [f"ready/{r}" for r in range(self.size, size)]
        while any(get(path) is None for path in need) or fault("slow_prepare"):
            await asyncio.sleep(0.02)
        self.scaling["phase"], self.gate = "committing", "scaling"
        await asyncio.sleep(0.1)
        while fault("stuck_commit"):
            if RANK == 1:
                print("[FT] Engine 1 status -> UNHEALTHY:", flush=True)
            await asyncio.sleep(0.1)
        if fault("fail") or fault("late_drain"):
            self.scaling |= {"phase": "failed", "is_scaling_elastic_ep": False, "error": "injected"}
            status = 408 if fault("late_drain") else 500
            return status, {"error": {"message": "Scale failed", "type": "x", "param": None, "code": status}}
        put(f"committed/{epoch}/{RANK}", size)
        if RANK == 0:
            put("epochs", int(epoch, 16))
        while any(get(f"committed/{epoch}/{r}") is None for r in range(self.size)):
            await asyncio.sleep(0.02)
        self.size = size
        await asyncio.sleep(0.05)
        (DIR / f"posts/{size}/{RANK}").unlink(missing_ok=True)
        if RANK == 0:
            (DIR / f"posts/{size}/epoch").unlink(missing_ok=True)
        self.gate = "" if size > RANK else "retired"
        self.generated = 0
        if self.gate:
            for child in self.children:
                child.kill()
                child.wait()
            await asyncio.sleep(0.3)  # vLLM's engine ends before the server answers
        self.scaling |= {"is_scaling_elastic_ep": False, "phase": "completed"}
        return 200, {"message": f"Scaled to {size} data parallel engines"}

    async def answer(self, method: str, path: str, body: object) -> tuple[int, object]:
        if path == "/health":
            return 200, ""
        if path == "/is_scaling_elastic_ep":
            return 200, self.scaling
        if self.gate == "scaling" or fault("wedged"):
            return 503, {"error": "The model is currently scaling. Please try again later."}
        if self.gate == "retired":
            return 503, {"error": "This data-parallel rank has been retired and is awaiting shutdown."}
        if path == "/v1/models":
            return 200, {"data": []}
        if path == "/metrics":
            label = f'{{engine="{RANK}",model_name="m"}}'
            text = f"vllm:num_requests_running{label} {self.running}.0\nvllm:num_requests_waiting{label} 0.0\n"
            return 200, f"{text}vllm:generation_tokens_total{label} {self.generated}.0\n"
        if "/fault_tolerance/" in path and fault("pr46370"):
            return await self.fault_tolerance(path, body)
        if path.startswith("/v1/healer/in-place"):
            return await self.in_place(path.removeprefix("/v1/healer/in-place"), body) if PLUGIN else (404, {})
        if path == "/fault_tolerance/status":
            dead = any(s in "ZX" for s in self.others()) and self.running
            sick = dead or (fault("unhealthy") and not (self.retried and not fault("half")))
            engine = {"id": RANK, "status": "unhealthy" if sick else "healthy"}
            return 200, {"schema_version": 1, "total_engines": 1, "engines": [engine]}
        if path == "/fault_tolerance/apply":
            if not isinstance(body, dict) or body.get("instruction") != "retry":
                return 400, {"error": {"message": "Invalid instruction.", "code": 400}}
            self.retried = True
            put(f"retries/{RANK}", int(get(f"retries/{RANK}", 0)) + 1)  # type: ignore[call-overload]
            return 202, {"message": "Request accepted", "request_id": "x"}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/scale_elastic_ep" and isinstance(body, dict):
            return await self.scale(body["new_data_parallel_size"])
        if path == "/v1/completions" and isinstance(body, dict):
            return await self.generate(body)
        return 404, {"detail": "Not Found"}

    async def fault_tolerance(self, path: str, body: object) -> tuple[int, object]:
        if not path.startswith("/v1"):
            return 404, {"detail": "Not Found"}
        if path.endswith("status"):
            engine = {"id": RANK, "status": "unhealthy" if self.unhealthy else "healthy", **self.last}
            if self.unhealthy:
                engine |= {"mask": [int(s in "ZX") for s in self.others()], "fault_info": "RuntimeError"}
            return 200, {"schema_version": 1, "total_engines": 1, "engines": [engine]}
        assert isinstance(body, dict)
        if body["instruction"] not in ("retry", "scale_down"):
            return 400, {"error": {"message": f"Invalid instruction: '{body['instruction']}'.", "code": 400}}
        if not body.get("request_id"):
            return 400, {"error": {"message": "'request_id' must be a non-empty string.", "code": 400}}
        asyncio.get_running_loop().create_task(self.apply(body))
        return 202, {"message": "Request accepted", "request_id": body["request_id"]}

    async def apply(self, body: dict) -> None:
        name, params = body["request_id"], body["params"]
        gone = set(params.get("removed_dp_ranks", []))
        alive = [r for r in gone if state_of(int(str(get(f"ranks/{r}", 0)))) not in "ZX"]
        rules = {
            "status is HEALTHY": not self.unhealthy,
            "ranks live": bool(alive),
            "wrong ranks": body["instruction"] == "scale_down"
            and (not gone or RANK in gone or not gone - self.removed),
            "no store": 0 in gone and not {"dp_master_ip", "dp_store_port"} <= params.keys(),
        }
        if broken := [rule for rule, held in rules.items() if held] or (["injected"] if fault("cannot_remove") else []):
            put(f"broken_rules/{RANK}", broken)
            self.last = {"last_ft_request_id": name, "ft_error": broken[0]}
            return
        put(f"rounds/{name}/{RANK}", sorted(gone))
        rest = [r for r in range(self.size) if r not in gone | self.removed]
        while any(get(f"rounds/{name}/{r}") != sorted(gone) for r in rest) or fault("hang_remove"):
            await asyncio.sleep(0.02)
        self.removed |= gone
        self.unhealthy, self.last = False, {"last_ft_request_id": name}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                sizes = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")]
                raw = await reader.readexactly(sizes[0] if sizes else 0)
                status, found = await self.answer(method, path, json.loads(raw) if raw else None)
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run(self) -> None:
        put(f"ranks/{RANK}", self.engine)
        if FILLS:
            await self.fill()
        elif JOINS:
            put(f"ready/{RANK}", 1)
            while not any((DIR / f"committed/{e:x}").exists() and self.committed(f"{e:x}") for e in range(1, 99)):
                await asyncio.sleep(0.02)
            (DIR / f"ready/{RANK}").unlink(missing_ok=True)
            newest = max((int(p.name, 16) for p in (DIR / "committed").iterdir()), default=0)
            self.scaling |= {"phase": "completed", "epoch": f"{newest:x}", "requested_data_parallel_size": self.size}
        server = await asyncio.start_server(self.serve, "127.0.0.1", PORT)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.closing.set)
        while not self.closing.is_set():
            await asyncio.sleep(0.05)
            if not self.gate and any(child.poll() is not None for child in self.children):
                server.close()
                if fault("deaf"):
                    loop.remove_signal_handler(signal.SIGTERM)
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    time.sleep(1e6)
                break  # exit code 0, as vLLM's
        for child in self.children:
            child.kill()
        os._exit(0)

    async def fill(self) -> None:
        put(f"hello/{RANK}", os.getpid())
        while get("answered") != os.getpid():
            await asyncio.sleep(0.02)
        if fault("bad_joiner"):
            print("RuntimeError: injected in its preparation", flush=True)
            for child in self.children:
                child.kill()
            os._exit(1)
        epoch = int(str(get("refill")))
        put(f"eep/{RANK}", epoch)
        while (found := get(f"committed_refill/{epoch}")) is None:
            await asyncio.sleep(0.02)
        assert isinstance(found, list)
        self.removed, self.epoch = set(range(self.size)) - set(found), epoch

    def committed(self, epoch: str) -> bool:
        return get(f"committed/{epoch}/0") == self.size


if __name__ == "__main__":
    asyncio.run(Rank().run())
