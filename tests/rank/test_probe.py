import pytest
import torch

from elastic.errors import ElasticError
from elastic.rank.device import CPU
from elastic.rank.probe import probe


def test_a_sound_device_passes() -> None:
    report = probe(CPU)
    assert report.memory_bytes > 0
    assert report.seconds > 0


def test_a_device_that_computes_wrongly_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = real(left, right)
        if result.dtype == torch.float32:
            result[3, 5] += 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    with pytest.raises(ElasticError, match=r"arithmetic.*round 1"):
        probe(CPU)


def test_a_device_that_forgets_what_was_written_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.fill_

    def forgets(tensor: torch.Tensor, value: int) -> torch.Tensor:
        filled = real(tensor, value)
        if filled.dtype == torch.uint8:
            filled[100] ^= 4
        return filled

    monkeypatch.setattr(torch.Tensor, "fill_", forgets)
    with pytest.raises(ElasticError, match="memory: 1 bytes"):
        probe(CPU)
