"""The planner beside DeepSeek's, as vLLM ships it, on the same inputs: `python -m elastic.placement.bench`."""
