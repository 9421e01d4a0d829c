"""Heavy honest load: no fault, and nothing that healing may act upon."""

import time
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from chaos.injectors.base import Done, Family, Injector, Place


class Burst(Injector):
    """So many requests more, all at once."""

    family: ClassVar[Family] = "load"
    needs: ClassVar[tuple[str, ...]] = ("extra_load",)
    kind: Literal["burst"]
    requests: Annotated[int, Field(ge=1, le=10_000)] = 50

    def inject(self, place: Place) -> Done:
        self.checked(place)
        assert place.extra_load is not None
        at = time.monotonic()
        place.extra_load(self.requests)
        return Done(at=at)
