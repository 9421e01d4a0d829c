"""A real vLLM group on two GPUs heals around its dead ranks, in one run: `python -m chaos.inplace_gpu`.

profile   how the group is started: what chaos.vllm_gpu knows, with more ranks than GPUs, and with or without the plugin
watch     clients at every rank's own server and at the router; what of it belongs to one event
kills     a rank is killed, the others go on, its slot is filled; planned scaling afterwards
growth    what a rank that lives through many deaths holds
overhead  two groups side by side, one stock and one with the plugin, loaded in turn; and the restart that stock vLLM needs
rank_log  captures, step modes and reloaded experts of a rank, from its log
records, report   what is written, part by part
"""
