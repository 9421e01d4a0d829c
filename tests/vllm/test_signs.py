"""What is read from logs, metrics and the table of processes."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic import process
from elastic.errors import ElasticError
from healer.load.exposition import Kind
from healer.load.plan import GATEWAY_QUERIES, router_metric
from healer.policy.load import PolicyError, parse_policy
from healer.policy.schema import VllmTarget
from healer.router.metrics import RouterMetrics
from healer.targets.vllm import commands
from healer.targets.vllm.deployment import experts as experts_of
from healer.targets.vllm.log_lines import LogTail, Said, Sign, read_line
from healer.targets.vllm.meters import Meter
from healer.targets.vllm.processes import Processes, sessions
from healer.targets.vllm.records import Part
from tests.vllm.stand import POLICY


@pytest.mark.parametrize(
    ("line", "sign", "peers"),
    [
        (
            "Warning: NIXL-EP timeout for dispatch receive, rank 0, local_expert_idx 3, src_rank 5",
            Sign.PEER_TIMEOUT,
            (5,),
        ),
        (
            "(Worker) NIXL-EP timeout for combine receive, rank 1, local_expert_idx 0, src_rank 2",
            Sign.PEER_TIMEOUT,
            (2,),
        ),
        ("NixlEP timeout for barrier, rank 1, dst_rank 3", Sign.PEER_TIMEOUT, (3,)),
        (
            "RuntimeError: Fault detected in EP all2all communication: rank masked. Mask: [0, 1, 0, 1]",
            Sign.MASKED,
            (1, 3),
        ),
        ("(EngineCore_DP1 pid=3) INFO [FT] Engine 1 status -> UNHEALTHY:", Sign.FAULT, ()),
        ("(EngineCore_DP1 pid=3) INFO [FT] Engine 1 status -> HEALTHY", None, ()),
        ("ERROR 11-29 async loop error (Rank 2): boom", Sign.EPLB_STOPPED, ()),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", Sign.STICKY, ()),
        ("INFO: NIXL-EP initialised, timeout 30 s", None, ()),
        ("torch.OutOfMemoryError: CUDA out of memory", None, ()),
    ],
)
def test_lines_of_a_log_that_name_a_peer_or_an_end(line: str, sign: Sign | None, peers: tuple[int, ...]) -> None:
    said = read_line(line)
    assert (said.sign if said else None, said.peers if said else ()) == (sign, peers)


def test_a_log_is_read_on_across_half_lines_and_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("async loop error (Rank 0): old\n")
    tail = LogTail(path)
    assert list(tail.new()) == []
    with path.open("a") as log:
        log.write("async loop er")
        log.flush()
        assert list(tail.new()) == []
        log.write("ror (Rank 1): new\n")
        log.flush()
    assert list(tail.new()) == [Said(Sign.EPLB_STOPPED, (), "async loop error (Rank 1): new")]
    path.write_text("async loop error (Rank 2): x\n")
    assert [said.text for said in tail.new()] == ["async loop error (Rank 2): x"]


def test_a_log_that_grew_too_long_is_cut_and_its_past_kept(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs/rank-0.0.log"
    with path.open("ab") as writer:
        writer.write(b"x" * 100_000)
        writer.flush()
        assert processes.cut_log("rank-0.0", 65536)
        writer.write(b"after")
        writer.flush()
    assert path.read_bytes() == b"after", "the rank goes on writing to the same file"
    assert path.with_name("rank-0.0.log.1").stat().st_size == 100_000


def text(running: int, generated: int, engine: int = 0, others: str = "") -> str:
    label = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {running}.0\n"
        f"vllm:num_requests_waiting{label} 2.0\nvllm:num_requests_waiting_by_reason{label} 9.0\n"
        f"vllm:generation_tokens_total{label} {generated}.0\n{others}"
    )


def test_generated_tokens_go_on_where_a_scale_up_has_reset_the_counter() -> None:
    meter, totals = Meter(), []
    for shown in (100, 150, 10, 30):
        load = meter.read(text(1, shown))
        assert load is not None
        totals.append(load.generated)
    assert totals == [100, 150, 160, 180]
    assert (load.running, load.waiting) == (1.0, 2.0)


def test_a_rank_counts_its_own_engine_only_where_it_shows_those_of_all() -> None:
    others = text(7, 900, engine=1)
    load = Meter().read(text(1, 50, engine=0, others=others), "0")
    assert load is not None
    assert (load.running, load.generated) == (1.0, 50.0)
    assert Meter().read("python_info 1.0\n") is None


async def test_all_of_a_session_is_ended_and_nothing_else(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])  # noqa: ASYNC220
    script = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "c = ['VLLM::EngineCore_DP0', '-S', '-c', 'import time; time.sleep(60)'];"
        "subprocess.Popen(c, executable=sys.executable); print('up', flush=True); time.sleep(60)"
    )
    try:
        one = processes.launch("rank-0.0", [sys.executable, "-S", "-c", script], os.environ)
        end = time.monotonic() + 20.0
        found = sessions({one.pid})[one.pid]
        while {p.part for p in found} != {Part.API, Part.ENGINE}:
            assert time.monotonic() < end, found
            await asyncio.sleep(0.01)
            found = sessions({one.pid})[one.pid]
        os.kill(one.pid, signal.SIGKILL)  # its engine stays behind
        await processes.end([one], deadline_s=0.2)
        assert not [p for p in found if process.is_alive(p.pid, p.pid_start)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_load_rules_find_every_signal_of_the_gateway_at_the_router_too() -> None:
    shown = {sample.name for family in RouterMetrics().registry.collect() for sample in family.samples}
    for metric, kind in GATEWAY_QUERIES.values():
        name = router_metric(metric) + ("_bucket" if kind == Kind.QUANTILE else "")
        assert name in shown
    assert router_metric("elastic_gateway_queued") in shown


def target(tmp_path: Path, **changes: str) -> VllmTarget:
    found = POLICY.format(folder=tmp_path, ranks=2, port=21000)
    for old, new in changes.items():
        found = found.replace(f"    {old}:", f"    {new}\n    #")
    spec = parse_policy(found, name="p", base=tmp_path).spec.target
    assert isinstance(spec, VllmTarget)
    return spec


def test_a_rank_is_launched_on_loopback_with_its_own_gpus_and_a_joiner_says_that_it_joins(tmp_path: Path) -> None:
    spec = target(
        tmp_path, model="gpus: [0, 1, 2, 3, 4, 5, 6, 7]\n    gpusPerRank: 2\n    apiKeyFile: key\n    model: m"
    )
    words = commands.command(spec, slot=2, dp_rank=1, size=3, rpc_port=5)
    pairs = dict(itertools.pairwise(words))
    assert (pairs["--host"], pairs["--port"]) == ("127.0.0.1", "21002")
    assert (pairs["--data-parallel-size"], pairs["--data-parallel-rank"]) == ("3", "1")
    inherited = {commands.JOINER: "1", "PATH": "/bin"}
    joins = commands.environment(spec, inherited, slot=2, joins=True, api_key="secret")
    assert (joins[commands.JOINER], joins["CUDA_VISIBLE_DEVICES"], joins["VLLM_API_KEY"]) == ("1", "4,5", "secret")
    assert commands.JOINER not in commands.environment(spec, inherited, slot=0, joins=False, api_key="")
    assert "secret" not in words


@pytest.mark.parametrize(
    ("experts", "redundant", "gpus", "expected"), [(64, 64, 4, 64), (64, 64, 3, 65), (8, 0, 3, 1), (None, 5, 3, 5)]
)
def test_a_launch_at_another_size_gets_redundant_experts_that_divide(
    tmp_path: Path, experts: int | None, redundant: int, gpus: int, expected: int
) -> None:
    assert commands.redundancy(experts, redundant, gpus) == expected
    args = ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 2, "use_async": false}', "--seed", "1")
    spec = target(tmp_path).model_copy(update={"args": args})
    words = commands.command(spec, slot=0, dp_rank=0, size=3, rpc_port=5, redundant=expected)
    assert [w for w in words if "eplb-config" in w] == [
        f'--eplb-config={{"num_redundant_experts": {expected}, "use_async": false}}'
    ]
    assert words[3:6] == ["--enable-eplb", "--seed", "1"]


def test_options_that_are_healers_own_are_refused_by_name(tmp_path: Path) -> None:
    spec = target(tmp_path).model_copy(update={"args": ("--port", "9")})
    with pytest.raises(ElasticError, match="--port is set by healer"):
        commands.arguments(spec)


def test_experts_are_read_from_the_models_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"n_routed_experts": 160}}')
    assert experts_of(target(tmp_path).model_copy(update={"model": str(tmp_path)})) == 160
    assert experts_of(target(tmp_path)) is None


def test_ranks_may_share_a_gpu_where_nccl_is_told_so(tmp_path: Path) -> None:
    good = POLICY.format(folder=tmp_path, ranks=2, port=21000)
    shared = good.replace("    basePort: 21000", "    basePort: 21000\n    gpus: [0, 1, 0, 1]")
    shared = shared.replace("    env: {", '    env: {NCCL_MULTI_RANK_GPU_ENABLE: "1", ')
    target = parse_policy(shared, name="p", base=tmp_path).spec.target
    assert isinstance(target, VllmTarget)
    assert target.gpus == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("    ranks: 2", "    ranks: 1", "spec.target.ranks"),
        ("    model: m", "    urls: [http://x:1]", "spec.target.model"),
        (
            "    basePort: 21000",
            "    basePort: 64000\n    gpus: [0, 0, 1]",
            "names a GPU twice, expected each once, or NCCL_",
        ),
        ("minRanks: 2", "minRanks: 1", "cannot scale to a single rank"),
        ("    model: m", "    mode: attach", "spec.target.urls"),
        ("    model: m", "    model: m\n    checkpoint: x", "unknown key"),
        ("kind: vllm", "kind: vlm", "expected one of 'embedded', 'vllm'"),
    ],
)
def test_a_policy_that_cannot_work_names_the_place(tmp_path: Path, old: str, new: str, told: str) -> None:
    good = POLICY.format(folder=tmp_path, ranks=2, port=21000)
    assert old in good
    with pytest.raises(PolicyError, match=told):
        parse_policy(good.replace(old, new), name="p", base=tmp_path)
