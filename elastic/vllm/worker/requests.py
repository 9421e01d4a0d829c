"""What a worker forgets of its requests after a fault: vLLM's scheduler sends those that it keeps again."""

# mypy: disable-error-code="import-not-found, import-untyped"
from typing import Any


def forget(worker: Any) -> None:
    """Model runner V2: everything, they come as new ones. V1: the batch, they come as cached ones of known requests."""
    runner = worker.model_runner
    runner.execute_model_state = None
    if worker.use_v2_model_runner:
        for request in list(runner.req_states.req_id_to_index):
            runner._remove_request(request)
        return
    runner.kv_connector_output = None
    batch = runner.input_batch
    for request in list(batch.req_id_to_index):
        batch.remove_request(request)
    batch.condense()
    batch.refresh_metadata()
    # tokens of the step that failed, which an asynchronous next step would take as its input
    batch.prev_sampled_token_ids = None
    batch.prev_req_id_to_index = None
