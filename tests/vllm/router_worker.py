"""For vLLM's own processes: the stub worker, with tokens that depend on the first 16 tokens of a prompt and on the absolute
position. So the right next token of prompt and answer so far is the same on every rank, as with a model.
"""

from typing import Any

from vllm_stub_worker import StubWorker  # type: ignore[import-not-found]


class PositionWorker(StubWorker):  # type: ignore[misc]
    def execute_model(self, scheduled: Any) -> Any:
        lengths = {rid: state[1] for rid, state in self.reqs.items()}
        output = super().execute_model(scheduled)
        lengths |= {rid: self.reqs[rid][1] for rid in output.req_ids}
        for rid, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[:] = [2 + (token - 2 + lengths[rid]) % 90 for token in tokens]
        return output
