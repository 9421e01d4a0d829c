"""What becomes of a survivor's requests: kept with their KV cache, computed again, or aborted.

Called while the engine's loop is parked and no step is in flight. What a request has *confirmed* is what steps wrote whose output
was accepted: `num_computed_tokens` without what is in flight. Behind it the cache may hold nothing, or the work of a step
that lost a peer. A kept request goes, with its blocks, to the head of `kv_holding_waiting`, from which vLLM's scheduler
resumes requests whose KV cache was loaded asynchronously: it is scheduled again from the confirmed position.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from elastic.vllm.records import HeldCounts, Requests

STEPS = frozenset({"step", "step_with_batch_queue"})
"""Of vLLM's EngineCore: where a scheduled step is a local variable until its output is accepted."""
MASKING = frozenset({"nixl_ep", "deepep_low_latency"})
"""All-to-all back ends that leave out a peer that does not come (v1/worker/sentinel/gpu_worker_sentinel.py)."""


@dataclass(frozen=True)
class Facts:
    """Of one running request and of its engine: what decides about it."""

    confirmed: int
    """Tokens whose KV cache is known to be right."""
    prompt: int
    """Tokens of the prompt."""
    encoder_inputs: bool
    """Images, audio: their encoder cache is per worker and forgotten with the request."""
    prompt_outputs: bool
    """Log probabilities of the prompt, pooling: gathered in the worker from the whole prompt."""
    session: bool
    """Of a streaming-input session; its slot in the model runner is held between turns."""
    seeded: bool
    kv_connector: bool
    """Prefill and decode apart, or offloading: a transfer may be half done."""
    aux_outputs: bool
    """Outputs that are gathered beside the tokens, such as routed experts."""
    admitted_in_lost_step: bool
    """Nothing of it was accepted since it was taken from the queue: the blocks that it found in the prefix cache may be those
    that another request of the same lost step should have written."""
    paged_only: bool
    """Every layer keeps its state in blocks by position. State-space layers do not: a failed step has changed them."""
    runner_v2: bool
    unseen_mask: bool
    """A back end that masks peers, and model runner V1 without async scheduling, which accepts a step's tokens before it has
    looked at the mask (v1/worker/gpu_model_runner.py)."""


def rule(order: Requests, facts: Facts) -> Requests:
    """The most that is safe, and not more than was ordered."""
    if order == Requests.ABORT or facts.kv_connector or facts.session or facts.unseen_mask:
        return Requests.ABORT
    if order == Requests.RECOMPUTE or not facts.confirmed or facts.admitted_in_lost_step:
        return Requests.RECOMPUTE
    if not facts.paged_only or facts.aux_outputs:
        return Requests.RECOMPUTE
    prefilling = facts.confirmed < facts.prompt
    if prefilling and (facts.encoder_inputs or facts.prompt_outputs):
        return Requests.RECOMPUTE
    if facts.seeded and not facts.runner_v2:
        # its generator lives in the worker's request state and may be one draw ahead: no tokens are the right ones
        return Requests.ABORT
    return Requests.KEEP


def confirmed_tokens(computed: int, in_flight: int, stale: int) -> int:
    """`stale`: of what is in flight, what a preemption has already taken back."""
    return max(0, computed - max(0, in_flight - stale))


def facts_of(engine: Any, request: Any, admitted: Collection[str]) -> Facts:
    scheduler, params = engine.scheduler, request.sampling_params
    masks = engine.vllm_config.parallel_config.all2all_backend in MASKING
    runner_v2 = bool(scheduler.use_v2_model_runner)
    return Facts(
        confirmed=confirmed_tokens(
            request.num_computed_tokens, request.num_in_flight_tokens, request.num_stale_output_tokens
        ),
        prompt=request.num_prompt_tokens,
        encoder_inputs=bool(request.has_encoder_inputs),
        prompt_outputs=params is None or params.prompt_logprobs is not None,
        session=bool(request.resumable),
        seeded=params is not None and params.seed is not None,
        kv_connector=scheduler.connector is not None,
        admitted_in_lost_step=request.request_id in admitted,
        aux_outputs=scheduler.aux_output_connector is not None,
        paged_only=_paged_only(scheduler.kv_cache_config),
        runner_v2=runner_v2,
        unseen_mask=masks and not runner_v2 and not engine.async_scheduling,
    )


def _paged_only(config: Any) -> bool:
    from vllm.v1.kv_cache_interface import AttentionSpec

    return all(isinstance(group.kv_cache_spec, AttentionSpec) for group in config.kv_cache_groups)


@dataclass
class Lost:
    """What was in flight when the loop parked, and whose output nobody accepts any more."""

    steps: int = 0
    new: set[str] = field(default_factory=set)
    """Requests that these steps took from the queue for the first time: a worker may never have heard of them."""
    resumed: set[str] = field(default_factory=set)
    """Requests that they took from it again."""

    @property
    def admitted(self) -> set[str]:
        return self.new | self.resumed

    def add(self, scheduled: Any) -> None:
        """A step of the scheduler."""
        if scheduled is None or not scheduled.total_num_scheduled_tokens:
            return
        self.steps += 1
        self.new |= {new.req_id for new in scheduled.scheduled_new_reqs}
        self.resumed |= set(scheduled.scheduled_cached_reqs.resumed_req_ids)


def lost_steps(engine: Any, error: BaseException) -> Lost:
    """Those that wait in the engine's batch queue, and the one that `error` came out of, which only its traceback has."""
    lost = Lost()
    for _, scheduled, _ in engine.batch_queue or ():
        lost.add(scheduled)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name in STEPS:
            for name in ("scheduler_output", "deferred_scheduler_output"):
                lost.add(trace.tb_frame.f_locals.get(name))
        trace = trace.tb_next
    return lost


def hold(engine: Any, order: Requests, lost: Lost) -> HeldCounts:
    """Take every running request out of the batch by the rule. May be repeated: then there is none left.

    Where steps were lost, blocks that a request gave back meanwhile may hold what was never written, and nobody knows which: every
    cached block that no request holds loses its entry.
    """
    from vllm.v1.request import RequestStatus

    scheduler = engine.scheduler
    running, aborted, counts = list(scheduler.running), list[str](), dict[str, int]()
    evicted = _evict_unconfirmed(engine, running)
    scheduler.running = []
    for request in reversed(running):
        what = rule(order, facts_of(engine, request, lost.admitted))
        if what == Requests.ABORT:
            scheduler.running.append(request)  # finish_requests takes it from there
            aborted.append(request.request_id)
        elif what == Requests.RECOMPUTE:
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            if request.request_id in lost.new:
                request.status = (
                    RequestStatus.WAITING
                )  # model runner V1 is told of it as a new one, not as one it knows
        else:
            counts["kept_tokens"] = counts.get("kept_tokens", 0) + _keep(scheduler, request)
        counts[what] = counts.get(what, 0) + 1
    # also those with their KV cache at peers that are gone, or in a runner's slot that is forgotten
    unsafe = [r.request_id for r in scheduler.requests.values() if r.resumable or scheduler.connector is not None]
    if order == Requests.ABORT:
        unsafe = list(scheduler.requests)
    gone = _abort(engine, [*aborted, *unsafe])
    _nothing_in_flight(scheduler)
    if lost.steps:
        pool = scheduler.kv_cache_manager.block_pool
        free = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None}
        pool.evict_blocks(free)
        evicted += len(free)
    return HeldCounts(
        kept=counts.get(Requests.KEEP, 0),
        recomputed=counts.get(Requests.RECOMPUTE, 0),
        aborted=gone,
        kept_tokens=counts.get("kept_tokens", 0),
        evicted_blocks=evicted,
    )


def _keep(scheduler: Any, request: Any) -> int:
    from vllm.v1.request import RequestStatus

    confirmed = confirmed_tokens(
        request.num_computed_tokens, request.num_in_flight_tokens, request.num_stale_output_tokens
    )
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = confirmed
    request.spec_token_ids = []
    request.num_output_placeholders = 0
    request.num_preemptions += 1
    scheduler._inflight_prefills.discard(request)
    scheduler.kv_holding_waiting.prepend_request(request)
    return confirmed


def _evict_unconfirmed(engine: Any, running: list[Any]) -> int:
    """vLLM gives blocks their prefix-cache hash when they are allocated, before the step that fills them: whoever hits one whose
    step has failed reads what was never written. Evicted are the block of the first unconfirmed position and all behind."""
    scheduler = engine.scheduler
    manager, bad = scheduler.kv_cache_manager, set[int]()
    for request in running:
        confirmed = confirmed_tokens(
            request.num_computed_tokens, request.num_in_flight_tokens, request.num_stale_output_tokens
        )
        groups = scheduler.kv_cache_config.kv_cache_groups
        for group, blocks in zip(groups, manager.get_block_ids(request.request_id), strict=True):
            bad.update(blocks[confirmed // group.kv_cache_spec.block_size :])
    if bad:
        manager.evict_blocks(bad)
    return len(bad)


def _abort(engine: Any, names: list[str]) -> int:
    from vllm.v1.request import RequestStatus

    gone = engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    engine._send_abort_outputs(gone)
    return len(gone)


def _nothing_in_flight(scheduler: Any) -> None:
    for request in scheduler.requests.values():
        request.num_in_flight_tokens = request.num_stale_output_tokens = 0
        request.drop_stale_output = False
    scheduler.prev_step_scheduled_req_ids.clear()
    if scheduler.defer_block_free:
        # the writes of every step have ended: what waited for the failed ones would wait for ever
        scheduler.processed_step_seq = scheduler.sched_step_seq
        scheduler._drain_deferred_frees()
