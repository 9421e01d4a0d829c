"""The results as a table for readers."""

from chaos.vllm_gpu.records import Part, Results


def markdown(results: Results) -> str:
    lines = [
        "# healer over vLLM on GPUs" if results.gpus else "# healer over vLLM's servers on a CPU: the harness only",
        "",
        f"{results.began}, {'; '.join(results.gpus) or results.machine.cpu}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(results.versions.items()))
        + f". {results.streams} clients, {results.tokens} tokens an answer, one request after another each.",
        "",
        "| Part | Took | Right answers | Wrong | Errors | Longest wait of a client | Nobody got a token for | Missed |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(part) for part in results.parts),
        "",
    ]
    for part in results.parts:
        lines += _details(part)
    return "\n".join(lines)


def _row(part: Part) -> str:
    load = part.load
    seen = (
        f"{load.right} | {load.wrong} | {load.errors} | {load.longest_wait_s:.2f} s | {load.longest_silence_s:.2f} s"
        if load
        else "| | | |"
    )
    return f"| {part.title} | {part.took_s:.1f} s | {seen} | {part.error} |"


def _details(part: Part) -> list[str]:
    lines = [f"## {part.name}", ""]
    lines += [f"* {name}: {_shown(value)}" for name, value in part.figures.items()]
    for one in part.sequences:
        phases = ", ".join(f"{p.name} {p.took_s:.1f} s" for p in one.phases)
        lines.append(
            f"* {one.kind} {one.outcome}, {one.began_s:.2f} s to {one.ended_s:.2f} s after the event: {phases}. {one.reason}"
        )
    for boot in part.boots:
        lines.append(f"* start of slot {boot.slot}, the longest silences in its log:")
        lines += [f'  * from {g.at_s:.0f} s on for {g.took_s:.0f} s, then {g.process}: "{g.then}"' for g in boot.gaps]
    if part.load is not None:
        lines += [f"* {text}" for text in part.load.shown]
    return [*lines, ""]


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
