"""Runs in a Python that has vLLM: reads questions, answers with the maps of its default EPLB policy and the times.

    python vllm_side.py QUESTIONS.npz ANSWERS.npz REPEATS

Question i is `load_i` [layers, experts], `shape_i` (replicas, ranks) and, if there is one, `old_i` [layers, replicas].
Answer i is `map_i` and `seconds_i`, wall time of each repetition. Nothing else of this project is imported.
"""

import sys
import time

import numpy as np
import torch
import vllm
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy


def main() -> None:
    questions, answers, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    asked = np.load(questions)
    told = {"version": np.array(vllm.__version__)}
    for i in range(int(asked["count"])):
        load = torch.from_numpy(asked[f"load_{i}"])
        replicas, ranks = (int(x) for x in asked[f"shape_{i}"])
        old = torch.from_numpy(asked[f"old_{i}"]) if f"old_{i}" in asked else None
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            placed = DefaultEplbPolicy.rebalance_experts(load, replicas, 1, 1, ranks, old)
            seconds.append(time.perf_counter() - began)
        told[f"map_{i}"] = placed.numpy()
        told[f"seconds_{i}"] = np.array(seconds)
    np.savez(answers, **told)


if __name__ == "__main__":
    main()
