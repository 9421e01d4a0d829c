"""The command `healer`. Each command imports what it needs when it runs, so that all start quickly."""

import sys

import typer

from elastic.errors import ElasticError
from healer.cli import control, life, reading
from healer.cli.common import Exit, app, exit_code
from healer.policy.cli import policy_app
from healer.targets.vllm.cli import vllm_app

__all__ = ["app", "main"]

app.add_typer(policy_app, name="policy")
app.add_typer(vllm_app, name="vllm")
for module in (life, reading, control):
    module.register(app)


def main() -> None:
    """Errors end in one message and a non-zero exit code, without a traceback."""
    try:
        app(prog_name="healer")
    except ElasticError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
