"""vLLM's own scheduler and block pool over a pretended KV cache, through faults, holds and what comes after. Run by
test_inplace_held.py with vLLM's interpreter; prints what it counted as JSON.

The pretended cache keeps, for every slot of every block, the tokens up to the position that was written there. Whenever a step
is scheduled, all positions that the scheduler takes for computed must hold just that: a block that was never written, or was
written by a step that lost a peer, shows at once. Tokens follow from the ones before them, so that answers can be compared too.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import json
import random
import sys
import zlib
from collections import Counter, deque
from typing import Any, NamedTuple

from elastic.vllm.held import Lost, hold
from elastic.vllm.records import Requests

BLOCK, BLOCKS, VOCABULARY = 4, 40, 300


def following(tokens: list[int]) -> int:
    return 3 + zlib.crc32(bytes(str(tokens), "ascii")) % (VOCABULARY - 3)


class Engine:
    """As much of an engine core as `hold` needs."""

    def __init__(self, model: str, *, async_scheduling: bool, longest: int = 128, blocks: int = BLOCKS) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        arguments = EngineArgs(
            model=model,
            load_format="dummy",
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=6,
            max_num_batched_tokens=16,
            block_size=BLOCK,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
        )
        self.vllm_config = arguments.create_engine_config()
        self.vllm_config.scheduler_config.async_scheduling = async_scheduling
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        import torch

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)], hash_block_size=BLOCK)
        kind = self.vllm_config.scheduler_config.get_scheduler_cls()
        manager = StructuredOutputManager(self.vllm_config)
        self.scheduler = kind(self.vllm_config, cache, manager, BLOCK, BLOCK)
        self.async_scheduling = self.vllm_config.scheduler_config.async_scheduling
        init_none_hash(hash)
        self.hasher = get_request_block_hasher(BLOCK, lambda value: zlib.crc32(repr(value).encode()).to_bytes(4, "big"))
        self.aborted: set[str] = set()

    def _send_abort_outputs(self, requests: list[Any]) -> None:
        self.aborted |= {request.request_id for request in requests}


class Part(NamedTuple):
    """Of a step: one request's."""

    name: str
    start: int
    count: int
    blocks: list[int]
    samples: bool


class World:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.flying: deque[tuple[Any, list[Part]]] = deque()
        """Steps that are scheduled and not accepted."""
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.number = seed * 1000
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}

    def add(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.number += 1
        shared = [5 + self.random.randrange(2)] * 3 + list(range(10, 10 + 4 * self.random.randrange(1, 5)))
        prompt = shared + [self.random.randrange(3, VOCABULARY) for _ in range(self.random.randrange(4))]
        tokens = self.random.randrange(1, 25)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        name = f"r{self.number}"
        self.wanted[name] = prompt, tokens
        self.engine.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.engine.hasher))

    def sequence(self, name: str, length: int) -> list[int]:
        tokens = list(self.wanted[name][0])
        while len(tokens) < length:
            tokens.append(following(tokens))
        return tokens[:length]

    def schedule(self) -> None:
        scheduler = self.engine.scheduler
        output = scheduler.schedule()
        began = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        began |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        step = []
        for name, count in output.num_scheduled_tokens.items():
            blocks = scheduler.kv_cache_manager.get_block_ids(name)[0]
            samples = not scheduler.requests[name].is_prefill_chunk
            step.append(Part(name, began[name], count, list(blocks), samples))
        self.flying.append((output, step))
        for part in step:
            self.flying_or_written(part.name, part.start, part.blocks)

    def flying_or_written(self, name: str, computed: int, blocks: list[int]) -> None:
        coming = {
            (part.blocks[place // BLOCK], place % BLOCK)
            for _, step in self.flying
            for part in step
            for place in range(part.start, part.start + part.count)
        }
        tokens = self.sequence(name, computed)
        for place in range(computed):
            at = blocks[place // BLOCK], place % BLOCK
            right = self.memory.get(at) == tuple(tokens[: place + 1])
            assert right or at in coming, f"{name} reads position {place} of block {at[0]}, which holds something else"

    def accept(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, step = self.flying.popleft()
        names, sampled = [], []
        for part in step:
            end = part.start + part.count
            tokens = self.sequence(part.name, end + 1)
            self.write(part, tokens)
            names.append(part.name)
            sampled.append([tokens[end]] if part.samples else [])
        places = {name: place for place, name in enumerate(names)}
        found = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        results = self.engine.scheduler.update_from_output(output, found)
        for outputs in results.values():
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finish(one.request_id)

    def finish(self, name: str) -> None:
        prompt, tokens = self.wanted.pop(name)
        given = self.answers.pop(name)
        self.wanted[name] = prompt, tokens
        assert given == self.sequence(name, len(prompt) + tokens)[len(prompt) :], f"{name}: {given}"
        self.counts["finished"] += 1

    def write(self, part: Part, tokens: list[int]) -> None:
        for place in range(part.start, part.start + part.count):
            self.memory[part.blocks[place // BLOCK], place % BLOCK] = tuple(tokens[: place + 1])

    def fault(self) -> None:
        """What is in flight is lost: some of it was written, some of it wrongly, some of it never."""
        order = self.random.choice([Requests.KEEP, Requests.KEEP, Requests.RECOMPUTE, Requests.ABORT])
        for _, step in self.flying:
            for part in step:
                kind, end = self.random.randrange(3), part.start + part.count
                if kind == 0:
                    self.write(part, self.sequence(part.name, end))
                elif kind == 1:
                    self.write(part, [-1] * end)
        lost = Lost()
        for output, _ in self.flying:
            lost.add(output)
        self.flying.clear()
        self.engine.aborted.clear()
        held = hold(self.engine, order, lost)
        again = hold(self.engine, order, lost)
        assert again.kept + again.recomputed == 0, "a second order finds nothing in the batch"
        for name in self.engine.aborted:
            self.answers.pop(name, None)
        done = {"kept": held.kept, "recomputed": held.recomputed, "aborted": held.aborted}
        self.counts.update(done | {"evicted": held.evicted_blocks, "faults": 1})

    def abort_one(self) -> None:
        """A client goes, also while its step is in flight."""
        from vllm.v1.request import RequestStatus

        names = list(self.engine.scheduler.requests)
        if names:
            name = self.random.choice(names)
            self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.answers.pop(name, None)
            self.counts["left"] += 1

    def run(self, turns: int) -> None:
        most = 2 if self.engine.async_scheduling else 1
        for _ in range(turns):
            dice = self.random.random()
            if dice < 0.12 and len(self.engine.scheduler.requests) < 9:
                self.add()
            elif dice < 0.15:
                self.abort_one()
            elif dice < 0.19:
                self.fault()
            elif len(self.flying) < most and self.engine.scheduler.has_requests():
                self.schedule()
            elif self.flying:
                self.accept()
        while self.engine.scheduler.has_requests() or self.flying:
            if len(self.flying) < most and self.engine.scheduler.has_requests() and not self.stands():
                self.schedule()
            else:
                self.accept()
        assert not self.engine.scheduler.requests

    def stands(self) -> bool:
        """Nothing new can be scheduled before an output is accepted."""
        return bool(self.flying) and not self.flying[-1][1]


def main() -> None:
    model, seeds = sys.argv[1], int(sys.argv[2])
    found = {}
    for async_scheduling in (False, True):
        total: Counter[str] = Counter()
        for seed in range(seeds):
            engine = Engine(model, async_scheduling=async_scheduling)
            world = World(engine, seed)
            try:
                world.run(600)
            except AssertionError as error:
                raise AssertionError(f"async {async_scheduling}, seed {seed}: {error}") from error
            total += world.counts
        found["async" if engine.async_scheduling else "sync"] = dict(total)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
