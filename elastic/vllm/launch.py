"""How the processes of a rank start: with the plugin loaded from their first line, and slot 0 like any other.

vLLM loads plugins when an engine core or a worker is under way already. A process that is spawned and not forked would make its
first groups before: the functions that such processes begin with are replaced by ones that load plugins first.

In stock vLLM the API server of rank 0 starts the DP coordinator, creates the store and answers the handshake of all engines; a
rank above 0 does none of it, and asks at `--data-parallel-address` and `--data-parallel-rpc-port`, where healer's coordination
process answers. In force where HEALER_COORDINATION=1.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

VARIABLE = "HEALER_COORDINATION"


_stock: dict[str, Callable[..., Any]] = {}


def run_engine_core(*args: Any, **options: Any) -> Any:
    """In the place of EngineCoreProc.run_engine_core. Found by its name in a process that is spawned."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.core import EngineCoreProc

    load_general_plugins()
    return _stock.get("engine", EngineCoreProc.run_engine_core)(*args, **options)


def worker_main(*args: Any, **options: Any) -> Any:
    """In the place of WorkerProc.worker_main."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor.multiproc_executor import WorkerProc

    load_general_plugins()
    return _stock.get("worker", WorkerProc.worker_main)(*args, **options)


def install() -> None:
    """May be called again. The guard has compared what is replaced here."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if not _stock:
        _stock.update(engine=EngineCoreProc.run_engine_core, worker=WorkerProc.worker_main)
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
        WorkerProc.worker_main = staticmethod(worker_main)
    if os.environ.get(VARIABLE) == "1":
        _slot_zero()


def _slot_zero() -> None:
    import vllm.entrypoints.cli.serve as serve
    import vllm.v1.engine.core_client as core_client
    from vllm.v1.engine import utils

    stock = utils.launch_core_engines
    if getattr(stock, "healer_installed", False):
        return

    @functools.wraps(stock)
    def launch_core_engines(config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        parallel = config.parallel_config
        if parallel.data_parallel_rank == 0 and parallel.data_parallel_external_lb:
            return _launch(utils, config, executor, log_stats, addresses)
        return stock(config, executor, log_stats, addresses)

    launch_core_engines.healer_installed = True  # type: ignore[attr-defined]
    for module in (utils, core_client, serve):
        if hasattr(module, "launch_core_engines"):
            module.launch_core_engines = launch_core_engines


@contextlib.contextmanager
def _launch(utils: Any, config: Any, executor: Any, log_stats: bool, addresses: Any) -> Iterator[Any]:
    """launch_core_engines as it is for a rank above 0 of an external load balancer."""
    import zmq
    from vllm.v1.utils import get_engine_client_zmq_addr

    parallel = config.parallel_config
    slot = parallel.data_parallel_rank
    outside = get_engine_client_zmq_addr(False, parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
    inside = utils.get_open_zmq_ipc_path()
    with utils.zmq_socket_ctx(inside, zmq.ROUTER, bind=True) as handshake:
        manager = utils.CoreEngineProcManager(
            vllm_config=config,
            executor_class=executor,
            log_stats=log_stats,
            handshake_address=outside,
            client_handshake_address=inside,
            local_client=True,
            local_engine_count=1,
            start_index=slot,
            local_start_index=parallel.data_parallel_rank_local or 0,
            tensor_queue=None,
        )
        launched = utils.CoreEngineLaunch(manager, None, addresses, None)
        yield launched
        engines = [utils.CoreEngine(index=slot, local=True)]
        utils.wait_for_engine_startup(handshake, engines, parallel, False, config.cache_config, launched)
