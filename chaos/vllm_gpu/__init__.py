"""healer over a real vLLM group on two GPUs, in one run: `python -m chaos.vllm_gpu`.

model     a Qwen3-MoE whose every token is right only with every expert that takes part; runs in vLLM's environment
profile   what differs between GPUs and vLLM's servers on a CPU: arguments, environment, how a transient fault is made
command   options, time limits and files, as chaos.inplace_gpu has them too
load      clients that compare every token
scene     the deployment that all parts share: the daemon, its processes, its journal
parts     start, scale, kill, retry under healer; and a kill without it
boot      what the start of a rank is made of, from its log
records, report   what is written, part by part
"""
