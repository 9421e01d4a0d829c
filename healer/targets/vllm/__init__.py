"""The target `vllm`: a stock vLLM 0.33 deployment, supervised over its own endpoints. What vLLM promises and where it does not
keep to it is in `docs/vllm.md`; nothing here imports vLLM."""
