"""DeepSeek's algorithm as an installed vLLM has it, asked in a process of its own Python."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastic.errors import ElasticError
from elastic.placement.problem import Floats, Ints

DEADLINE_S = 1200.0


@dataclass(frozen=True, eq=False)
class Question:
    load: Floats
    replicas: int
    ranks: int
    old: Ints | None = None
    """The map whose slots are kept where an expert stays on its rank; [layers, replicas]."""


@dataclass(frozen=True, eq=False)
class Answer:
    placed: Ints
    seconds: Floats


@dataclass(frozen=True)
class Baseline:
    """The vLLM of one Python interpreter."""

    python: str
    version: str = ""

    def ask(self, questions: Sequence[Question], *, repeats: int) -> tuple[list[Answer], str]:
        """The answers, single-threaded, and vLLM's version. Raises ElasticError with what the process said."""
        with tempfile.TemporaryDirectory() as folder:
            asked, told = Path(folder, "asked.npz"), Path(folder, "told.npz")
            arrays: dict[str, np.typing.NDArray[np.generic]] = {"count": np.array(len(questions))}
            for i, question in enumerate(questions):
                arrays[f"load_{i}"] = question.load
                arrays[f"shape_{i}"] = np.array([question.replicas, question.ranks])
                if question.old is not None:
                    arrays[f"old_{i}"] = question.old.astype(np.int64)
            np.savez(asked, **arrays)  # type: ignore[arg-type]
            side = str(Path(__file__).with_name("vllm_side.py"))
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            try:
                ran = subprocess.run(
                    [self.python, side, str(asked), str(told), str(repeats)],
                    env={**os.environ, **threads, "PYTHONPATH": ""},
                    capture_output=True,
                    text=True,
                    timeout=DEADLINE_S,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise ElasticError(f"vLLM's Python {self.python} does not answer: {error}") from error
            if ran.returncode:
                raise ElasticError(f"vLLM's Python {self.python} failed: {ran.stderr.strip()[-500:]}")
            answers = np.load(told)
            version = str(answers["version"])
            return [Answer(answers[f"map_{i}"], answers[f"seconds_{i}"]) for i in range(len(questions))], version
