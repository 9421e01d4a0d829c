"""The command `healer vllm`. It imports what it needs when it runs, so that `healer` starts quickly."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.errors import ElasticError

FAILED = 1
"""Exit code where something will not work, or, with --strict, not as expected."""

vllm_app = typer.Typer(no_args_is_help=True, help="Work with vLLM deployments.")


@vllm_app.callback()
def _vllm() -> None:
    pass


@vllm_app.command(epilog="Example: healer vllm check policies/vllm-external-lb.yaml")
def check(
    file: Annotated[Path, typer.Argument(help="A policy whose target is of kind vllm.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
) -> None:
    """Say what in a vLLM deployment will not work, each with its fix, before anything is started or touched."""
    import asyncio

    import msgspec

    from healer.policy.load import load_policy
    from healer.policy.schema import VllmTarget
    from healer.targets.vllm import commands, deployment, in_place
    from healer.targets.vllm.preflight import Level
    from healer.targets.vllm.preflight import check as findings_of

    policy = load_policy(file)
    target = policy.spec.target
    if not isinstance(target, VllmTarget):
        raise ElasticError(f"{file}: spec.target.kind is {target.kind}, expected vllm")
    read = deployment.read(policy, target)
    findings = findings_of(read)
    verdict = asyncio.run(in_place.verdict(target, commands.arguments(target)))
    failed = any(one.level == Level.ERROR or strict for one in findings)
    if as_json:
        report: dict[str, Any] = {"ok": not failed, "vllm": read.vllm, "nixl": read.nixl, "experts": read.experts}
        report["in_place"] = {"state": verdict.state, "reason": verdict.reason}
        typer.echo(json.dumps({**report, "findings": msgspec.to_builtins(findings)}, indent=1))
    else:
        for one in findings:
            typer.echo(f"{one.level.value}: {one.what}\n  fix: {one.fix}")
        typer.echo(f"healing in place: {verdict.state}{': ' if verdict.reason else ''}{verdict.reason}")
        if target.spares:
            # measured: docs/vllm.md
            typer.echo(f"spares: {target.spares}, about 0.6 GB of memory each")
        unknown = [name for name in ("vllm", "nixl", "experts") if getattr(read, name) is None]
        note = f" (not known here, so not checked: {', '.join(unknown)})" if unknown else ""
        typer.echo(f"{file}: {'will not work' if failed else 'nothing is in the way'}{note}")
    raise typer.Exit(FAILED if failed else 0)
