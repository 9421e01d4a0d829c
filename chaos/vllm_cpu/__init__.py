"""vLLM 0.33's own servers on a machine without a GPU, for tests: `make.sh DEST` makes the environment, `python -m
chaos.vllm_cpu.model DEST` a tiny model without weights. Only the GPU's work is replaced (`plugins/stub_worker`), or the two
collectives that vLLM lacks on a CPU are supplied (`plugins/ep_shim`)."""
