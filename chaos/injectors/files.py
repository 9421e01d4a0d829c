"""The checkpoint that replacements are loaded from: missing, or torn by an interrupted copy. Only a copy that belongs to the
run is ever touched."""

import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from chaos.injectors.base import Done, Family, Injector, Place
from elastic.errors import ElasticError

ASIDE = ".aside"


class _OfCheckpoint(Injector):
    family: ClassVar[Family] = "checkpoint"
    needs: ClassVar[tuple[str, ...]] = ("checkpoint",)
    lasts: ClassVar[bool] = True

    def weights(self, place: Place) -> list[Path]:
        self.checked(place)
        assert place.checkpoint is not None
        found = sorted(place.checkpoint.glob("*.safetensors"))
        if not found:
            raise ElasticError(f"{place.checkpoint}: no *.safetensors")
        return found


class CheckpointMissing(_OfCheckpoint):
    """Its weights are gone."""

    kind: Literal["checkpoint-missing"]

    def inject(self, place: Place) -> Done:
        files, at = self.weights(place), time.monotonic()
        return _aside(files, at, 0.0)


class CheckpointTorn(_OfCheckpoint):
    """Only the first part of each file of weights is there."""

    kind: Literal["checkpoint-torn"]
    kept: Annotated[float, Field(gt=0, lt=1)] = 0.5

    def inject(self, place: Place) -> Done:
        files, at = self.weights(place), time.monotonic()
        return _aside(files, at, self.kept)


def _aside(files: list[Path], at: float, kept: float) -> Done:
    """Other files take the place of the real ones: whoever has those mapped keeps what it has."""
    for file in files:
        whole = file.with_name(file.name + ASIDE)
        file.rename(whole)
        if kept:
            size = int(whole.stat().st_size * kept)
            with whole.open("rb") as source:
                file.write_bytes(source.read(size))

    def back() -> None:
        for file in files:
            whole = file.with_name(file.name + ASIDE)
            if whole.exists():
                whole.replace(file)

    return Done(at=at, undo=f"puts {', '.join(f.name for f in files)} back", take_back=back)
