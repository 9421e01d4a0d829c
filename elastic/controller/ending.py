"""The end of a group: its processes, and the files that they leave."""

from pathlib import Path

from elastic.controller.state import ControllerLock
from elastic.launch.local import LocalLauncher
from elastic.paths import config_path, read_config, tier_path


def end_group(run_dir: Path) -> int:
    """End gateway and ranks of a group that no controller holds, and remove what they leave. Returns how many processes
    there were. Raises ElasticError where no group ever ran, or a controller holds it."""
    config = read_config(config_path(run_dir))
    lock = ControllerLock(config)
    lock.acquire()
    launcher = LocalLauncher(config)
    found = launcher.strays()
    for process in found:
        launcher.end(process)
    remove_leftovers(run_dir)
    for left in [run_dir / "gateway.json", run_dir / "gateway.sock"]:
        left.unlink(missing_ok=True)
    lock.release()
    return len(found)


def remove_leftovers(run_dir: Path) -> None:
    """Sockets of ranks and spares, and the host-memory tier."""
    for path in [*run_dir.glob("rank-*.sock*"), *run_dir.glob("spare-*.sock*"), tier_path(run_dir)]:
        path.unlink(missing_ok=True)
