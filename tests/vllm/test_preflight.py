from typing import Any

import pytest

from elastic.errors import ElasticError
from healer.targets.vllm.arguments import Arguments
from healer.targets.vllm.preflight import Deployment, Level, check

GOOD = (
    "deepseek --enable-elastic-ep --elastic-ep-max-dp-size 8 --enable-expert-parallel --enable-eplb "
    "--enable-fault-tolerance --all2all-backend nixl_ep --host 127.0.0.1 --no-enable-prefix-caching "
    "--data-parallel-external-lb --eplb-config.num_redundant_experts 256"
)


def found(arguments: str = GOOD, **changes: Any) -> dict[str, Level]:
    fields: dict[str, Any] = {
        "arguments": Arguments.parse(arguments.split()),
        "environment": {},
        "ranks": 4,
        "min_ranks": 2,
        "max_ranks": 8,
        "experts": 256,
        "vllm": "0.33.0",
        "nixl": "1.5.1",
        "settle_s": 45.0,
        "stall_after_s": 50.0,
    } | changes
    return {f.rule: f.level for f in check(Deployment(**fields))}


def test_a_deployment_made_for_it_has_nothing_to_complain_about() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    ("rule", "arguments", "changes"),
    [
        ("executable", GOOD, {"no_command": "vllm"}),
        ("model", GOOD, {"no_model": "/no/such/model"}),
        ("elastic-off", GOOD.replace("--enable-eplb ", ""), {}),
        ("elastic-off", GOOD.replace("--enable-elastic-ep", "--no-enable-elastic-ep"), {}),
        ("pipeline", GOOD + " -pp 2", {}),
        ("fault-tolerance-off", GOOD.replace("--enable-fault-tolerance ", ""), {}),
        ("fault-tolerance-backend", GOOD.replace("nixl_ep", "allgather_reducescatter"), {}),
        ("no-graph-reuse", GOOD.replace("nixl_ep", "deepep_low_latency"), {}),
        ("multi-port", GOOD + " --data-parallel-multi-port-external-lb", {}),
        ("hybrid", GOOD + " --data-parallel-hybrid-lb", {}),
        ("api-servers", GOOD + " --api-server-count=4", {}),
        ("ray", GOOD, {"external": False}),
        ("internal", GOOD + " --data-parallel-backend ray", {"external": False}),
        ("max-size", GOOD.replace("--elastic-ep-max-dp-size 8 ", ""), {}),
        ("max-size", GOOD, {"max_ranks": 9}),
        ("capacity", GOOD.replace("size 8", "size 12"), {}),
        ("capacity", GOOD.replace("size 8", "size 6") + " --tensor-parallel-size 2", {"max_ranks": 6}),
        ("redundancy", GOOD.replace("experts 256", "experts 128"), {}),
        ("redundancy-limit", GOOD.replace("experts 256", "experts 2000"), {}),
        ("divisibility", GOOD.replace("experts 256", "experts 258"), {}),
        ("single-rank", GOOD.replace("experts 256", "experts 768"), {"min_ranks": 1}),
        ("cpu-timeout", GOOD + " --cpu-distributed-timeout-seconds 3", {}),
        ("recovery-timeout", GOOD + ' --fault-tolerance-config {"engine_recovery_timeout_sec":10}', {}),
        ("settle", GOOD, {"settle_s": 30.0}),
        ("settle", GOOD, {"settle_s": 120.0}),
        ("settle", GOOD + ' --fault-tolerance-config {"engine_recovery_timeout_sec":45}', {}),
        ("stall-after", GOOD, {"stall_after_s": 10.0}),
        ("model-runner", GOOD + " --no-async-scheduling", {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}),
        ("fork", GOOD, {"environment": {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}}),
        ("drafter", GOOD + ' --speculative-config {"method":"deepseek_mtp"}', {}),
        ("prefix-cache", GOOD.replace("--no-enable-prefix-caching ", ""), {}),
        ("communicator", GOOD + " --eplb-config.communicator pynccl", {}),
        ("vllm-version", GOOD, {"vllm": "0.32.1"}),
        ("nixl-version", GOOD, {"nixl": "1.4.0"}),
        ("open-control", GOOD.replace("127.0.0.1", "0.0.0.0"), {}),
        ("argument", GOOD + " --api-server-count many", {}),
        ("argument", GOOD + " --eplb-config {", {}),
    ],
)
def test_what_will_not_work_is_said_before_anything_is_touched(
    rule: str, arguments: str, changes: dict[str, Any]
) -> None:
    assert rule in found(arguments, **changes)


def test_without_fault_tolerance_there_is_no_retry_to_wait_for() -> None:
    without = GOOD.replace("--enable-fault-tolerance ", "")
    assert set(found(without, settle_s=5.0, stall_after_s=5.0)) == {"fault-tolerance-off"}


def test_every_finding_says_how_to_mend_it_and_errors_come_first() -> None:
    bad = Arguments.parse(["m", "--cpu-distributed-timeout-seconds", "3", "--enable-elastic-ep"])
    findings = check(
        Deployment(
            arguments=bad,
            environment={},
            ranks=4,
            min_ranks=1,
            max_ranks=12,
            experts=250,
            vllm="0.33.0",
            nixl=None,
            settle_s=5.0,
            stall_after_s=10.0,
        )
    )
    levels = [f.level for f in findings]
    assert levels == sorted(levels)
    assert all(f.what and f.fix for f in findings)


def test_the_fix_for_too_few_redundant_experts_is_one() -> None:
    fix = next(
        f.fix
        for f in check(
            Deployment(
                arguments=Arguments.parse(GOOD.replace("experts 256", "experts 64").split()),
                environment={},
                ranks=4,
                min_ranks=3,
                max_ranks=8,
                experts=256,
                vllm="0.33.0",
                nixl="1.5.1",
                settle_s=45.0,
                stall_after_s=50.0,
            )
        )
        if f.rule == "redundancy"
    )
    number = int(fix.split("num_redundant_experts ")[1].split(",")[0])
    assert not {"redundancy", "divisibility"} & set(
        found(GOOD.replace("experts 256", f"experts {number}"), min_ranks=3)
    )


def test_arguments_are_read_as_vllm_reads_them() -> None:
    words = "m -tp 2 --enable_elastic_ep --eplb-config.use_async False --port=8000 --seed -1 --enforce-eager"
    found = Arguments.parse(words.split())
    assert (found.model, found.number("tensor-parallel-size"), found.number("port")) == ("m", 2, 8000)
    assert found.flag("enable-elastic-ep")
    assert found.flag("enforce-eager")
    assert found.text("seed") == "-1"
    assert found.config("eplb-config") == {"use_async": False}
    with pytest.raises(ElasticError, match="'stray'"):
        Arguments.parse(["m", "stray"])
