"""Hooks: real commands, a real server; what they are told, how they end, and what is never shown."""

import asyncio
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from healer.hooks import HookFacts, HookResult, HookRunner, call
from healer.policy.schema import Hook
from tests.healer.support import eventually

FACTS = HookFacts(
    hook="reset",
    slot=3,
    rule="bus",
    cause="xid",
    incident="inc-1",
    host="node-1",
    gpu_uuid="GPU-1",
    gpu_pci="0:1",
    xid=79,
)


def python(code: str, **more: Any) -> Hook:
    return Hook.model_validate({"kind": "exec", "command": [sys.executable, "-c", code], **more})


async def test_a_command_is_told_the_facts_and_its_output_is_kept() -> None:
    code = "import os; print({k: v for k, v in os.environ.items() if k.startswith('HEALER_')})"
    result = await call(python(code), FACTS)
    assert result.ok
    for part in ("'HEALER_SLOT': '3'", "'HEALER_XID': '79'", "'HEALER_GPU_UUID': 'GPU-1'", "'HEALER_HOST': 'node-1'"):
        assert part in result.text


async def test_a_command_that_fails_is_a_failure_with_its_last_words() -> None:
    result = await call(python("import sys; print('x' * 100_000); sys.exit('no such GPU')"), FACTS)
    assert not result.ok
    assert result.text.endswith("no such GPU")
    assert len(result.text) <= 2000
    result = await call(python("raise SystemExit(3)"), FACTS)
    assert result.text == "exit code 3"


async def test_nothing_is_read_by_a_shell_and_the_daemons_environment_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "abc")
    hook = Hook.model_validate({"kind": "exec", "command": ["/bin/echo", "$(id)", "; ls", "$HOME"]})
    assert (await call(hook, FACTS)).text == "exit code 0: $(id) ; ls $HOME"
    assert "SECRET_OF_THE_DAEMON" not in (await call(python("import os; print(os.environ)"), FACTS)).text


async def test_a_secret_comes_from_its_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter22\n")
    hook = python("import os; print('token', os.environ['TOKEN'])", envFiles={"TOKEN": str(tmp_path / "token")})
    result = await call(hook, FACTS)
    assert result.ok
    assert "hunter22" not in result.text
    (tmp_path / "token").unlink()
    result = await call(hook, FACTS)
    assert not result.ok
    assert "token" in result.text


async def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"p = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    began = time.monotonic()
    result = await call(python(code, deadline="2s"), FACTS)
    assert not result.ok
    assert "took longer than 2 s" in result.text
    assert time.monotonic() - began < 20
    child = int((tmp_path / "pid").read_text())
    await eventually(lambda: not _runs(child), "the child of the command has ended")


async def test_a_command_that_does_not_exist_is_a_failure() -> None:
    result = await call(Hook.model_validate({"kind": "exec", "command": ["/no/such/program"]}), FACTS)
    assert not result.ok
    assert "/no/such/program" in result.text


async def test_closing_ends_what_runs_and_reports_no_end(tmp_path: Path) -> None:
    ended: list[HookResult] = []
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    runner = HookRunner({"reset": python(code)}, lambda facts, result: ended.append(result))
    runner.start(FACTS)
    await eventually(lambda: pid.exists() and pid.read_text() != "", "the command runs")
    await runner.close()
    assert not _runs(int(pid.read_text()))
    assert ended == []


async def test_the_end_of_a_call_is_reported_once() -> None:
    ended: list[tuple[int, bool]] = []
    runner = HookRunner({"reset": python("pass")}, lambda facts, result: ended.append((facts.slot, result.ok)))
    runner.start(FACTS)
    await eventually(lambda: bool(ended), "the hook has ended")
    await runner.close()
    assert ended == [(3, True)]


class _Server(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[dict[str, Any], str]]] = []
    status = 204

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).seen.append((body, self.headers.get("authorization", "")))
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


async def test_a_webhook_posts_the_facts_and_only_success_is_success(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "auth").write_text("Bearer hunter22\n")
    url = f"http://127.0.0.1:{server.server_port}/"
    hook = Hook.model_validate(
        {"kind": "webhook", "url": url, "headerFiles": {"authorization": str(tmp_path / "auth")}, "deadline": "20s"}
    )
    try:
        assert (await call(hook, FACTS)).ok
        _Server.status = 500
        result = await call(hook, FACTS)
        assert not result.ok
        assert "status 500" in result.text
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
    body, auth = _Server.seen[0]
    assert (body["slot"], body["xid"], auth) == (3, 79, "Bearer hunter22")
    result = await call(hook, FACTS)
    assert not result.ok
    assert "hunter22" not in result.text


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
