"""The target `vllm`: a stock vLLM 0.33 deployment, supervised over its own endpoints. What vLLM promises and where it does not
keep to it is in `docs/vllm.md`; nothing here imports vLLM.

    arguments, preflight, cli   what the deployment is told, and what of it cannot work
    endpoints, meters           one API server, asked over HTTP
    log_lines, processes        what no endpoint says: a rank's log, and the processes of its session
    commands, starters          how a rank is launched, or by whose hook
    spare, spares               processes that have imported vLLM and wait to become a rank
    watch, polling, signals     since when a rank is how, and that as the events of healer's senses
    machine, plan               the states of the group, and what is to be done next: pure
    group, adopt                the picture of the group, and how a new daemon gets it
    sequences, scaling, recovery, proof, record
                                what is done to the group, and what counts as success
    state, router               what outlives the daemon: a file, and the router's process
    target, ray                 behind `healer.targets.Target`: one server for each rank, or one for all
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # each command of the command line loads this package: it must cost nothing
    from elastic.controller.records import Event
    from healer.authority import Authority
    from healer.policy.schema import Policy
    from healer.targets import Target


def make_target(policy: "Policy", on_event: "Callable[[Event], None]", authority: "Authority") -> "Target":
    """Raises ElasticError where the policy's arguments contradict healer's own."""
    from healer.policy.schema import VllmTarget

    target = policy.spec.target
    if isinstance(target, VllmTarget) and target.load_balancing == "internal":
        from healer.targets.vllm.ray import RayTarget

        return RayTarget(policy, on_event, observe_only=policy.spec.dry_run, authority=authority)
    from healer.targets.vllm.target import VllmGroupTarget

    return VllmGroupTarget(policy, on_event, observe_only=policy.spec.dry_run, authority=authority)
