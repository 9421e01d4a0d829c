"""`python -m chaos.vllm_gpu` and `python -m chaos.inplace_gpu` end in order where they cannot run, or are used in a wrong way."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from chaos.inplace_gpu import __main__ as benchmark
from chaos.vllm_gpu import __main__ as scenario

Main = Callable[[Sequence[str] | None], int]


@pytest.mark.parametrize("main", [scenario.main, benchmark.main], ids=["scenario", "benchmark"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "cpu", "--vllm-cpu", "/nowhere"], "/nowhere: no overlay033 in it"),
        (["--profile", "h200"], "no NVIDIA GPU is seen here"),
    ],
)
def test_without_what_it_needs_the_command_ends_with_one_sentence(
    tmp_path: Path,
    main: Main,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert main([*arguments, "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (scenario.main, ["--parts", "start,explode"], "unknown: explode"),
        (benchmark.main, ["--parts", "load,explode"], "unknown: explode"),
        (benchmark.main, ["--ranks", "5"], "invalid choice: 5"),
        (benchmark.main, ["--cycles", "0"], "must be positive"),
        (benchmark.main, ["--env", "NAME"], "expected NAME=VALUE"),
    ],
)
def test_wrong_usage_is_named(
    tmp_path: Path, main: Main, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
