"""`spec.hooks`: commands and URLs of the site that a rule may call."""

from typing import Annotated, Literal

from pydantic import Field

from healer.policy.schema.base import Duration, Listed, Model, PathText

HookKind = Literal["reset", "reboot", "webhook", "exec"]
DESTRUCTIVE_HOOKS = frozenset({"reset", "reboot"})


class Hook(Model):
    """A command or a URL. The facts of the case come as environment variables HEALER_HOOK, HEALER_INCIDENT, HEALER_RULE,
    HEALER_CAUSE, HEALER_SLOT, HEALER_HOST, HEALER_GPU_UUID, HEALER_GPU_PCI, HEALER_XID and HEALER_SENTENCE, to a URL as a
    JSON object."""

    kind: HookKind
    """What it does: `reset` resets a GPU, `reboot` restarts a host (both count as destructive), `exec` runs any other
    command, `webhook` posts to a URL."""
    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Listed] = ()
    """Program and arguments, run as they stand: no shell reads them. Exit code 0 is success."""
    url: str = ""
    """Of a webhook, http or https. An answer of 200 to 299 is success."""
    deadline_s: Duration = 60.0
    """The command is ended, the request given up after this: a failure."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the command, beside PATH, HOME and HEALER_*. No secrets: they would stand in the file."""
    env_files: dict[str, PathText] = Field(default_factory=dict)
    """Environment variables whose value is the content of a file, read at each call and never logged."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of the request. No secrets."""
    header_files: dict[str, PathText] = Field(default_factory=dict)
    """Headers whose value is the content of a file, read at each call and never logged."""

    @property
    def destructive(self) -> bool:
        return self.kind in DESTRUCTIVE_HOOKS
