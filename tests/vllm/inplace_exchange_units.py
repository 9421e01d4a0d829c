"""The exchange of the worker's side, against vLLM's own manager; run in vLLM's interpreter by test_inplace_worker_units.py."""

# mypy: disable-error-code="import-not-found, import-untyped"

import pytest

from elastic.vllm.worker import exchange
from tests.vllm.inplace_exchange_fakes import Manager, Published, install, made, manager


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    install()


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_any_rank_can_be_dropped_and_its_loss_is_no_fault_of_later_steps(dead: int) -> None:
    rank = 2
    found, buffer = made(rank, 4, 8)
    buffer.mask[dead] = 1  # as the early release or a kernel's timeout does
    assert bool(found.query_fault())
    buffer.memory.fill_(7)
    exchange.exchange.drop([dead])
    assert not bool(found.query_fault())
    assert buffer.links == {0, 1, 3} - {dead}
    assert int(buffer.memory.abs().sum()) == 0
    order = [call.split()[0] for call in buffer.calls]
    assert order.index("disconnect") < order.index("zero") < order.index("clean")
    assert [buffer.mask[r] for r in range(4)] == [int(r == dead) for r in range(4)]
    other = next(r for r in (0, 1, 3) if r != dead)
    buffer.mask[other] = 1
    assert bool(found.query_fault()), "a second fault must be seen"


def test_a_rank_that_connects_for_a_refill_disturbs_no_step_until_it_is_switched_on() -> None:
    found, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    joined = manager(0, (0, 1, 2), 3)
    joined.stage_ep_size()
    assert buffer.mask[1] == 1
    assert not bool(found.query_fault())
    assert not bool(joined.query_fault())
    joined.commit_ep_size()
    assert buffer.mask[:3] == [0, 0, 0]
    assert not bool(joined.query_fault())
    buffer.mask[1] = 1
    assert bool(joined.query_fault())


def test_a_refill_that_is_given_up_leaves_the_exchange_as_it_was() -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    before = (set(buffer.links), list(buffer.mask))
    manager(0, (0, 1, 2), 3).stage_ep_size()
    exchange.exchange.disconnect([1])
    exchange.exchange.disconnect([1])
    assert (set(buffer.links), list(buffer.mask)) == before


def test_a_connect_that_fails_leaves_the_exchange_as_it_was_and_the_next_one_connects() -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    before = (set(buffer.links), list(buffer.mask))
    buffer.fails = True
    with pytest.raises(RuntimeError, match="Assertion"):
        manager(0, (0, 1, 2), 3).stage_ep_size()
    assert (set(buffer.links), list(buffer.mask)) == before
    buffer.fails = False
    manager(0, (0, 1, 2), 3).stage_ep_size()
    assert buffer.links == {1, 2}


def test_a_store_that_fails_before_anybody_is_connected_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, buffer = made(0, 3, 4)
    exchange.exchange.drop([1])
    monkeypatch.setattr(Published, "fails", True)
    with pytest.raises(RuntimeError, match="reset by peer"):
        manager(0, (0, 1, 2), 3).stage_ep_size()
    assert buffer.links == {2}
    assert "disconnect [1]" not in buffer.calls[-1]


def test_a_death_while_a_joiner_is_connected_does_not_switch_the_joiner_on() -> None:
    _, buffer = made(0, 4, 4)
    exchange.exchange.drop([1])
    manager(0, (0, 1, 2, 3), 4).stage_ep_size()
    exchange.exchange.drop([3])
    assert buffer.mask == [0, 1, 0, 1]


def test_the_highest_live_rank_bounds_what_is_read_of_the_mask() -> None:
    found, _ = made(0, 4, 8)
    exchange.exchange.drop([2])
    assert found.query_active_mask().shape == (4,)
    exchange.exchange.drop([3])
    assert found.query_active_mask().shape == (2,)


def test_stock_scaling_up_and_down_connects_and_masks_as_vllm_does() -> None:
    _, buffer = made(0, 2, 4)
    larger = manager(0, (0, 1, 2, 3), 4)
    larger.stage_ep_size()
    assert buffer.calls[-1] == "connect [2, 3] False"
    larger.commit_ep_size()
    assert buffer.mask == [0, 0, 0, 0]
    assert Manager._buffer.active_ep_size == Manager._buffer.connected_ep_size == 4
    assert not bool(larger.query_fault())
    smaller = manager(0, (0, 1), 2)
    smaller.stage_ep_size()
    assert buffer.links == {1, 2, 3}
    smaller.commit_ep_size()
    assert buffer.links == {1}
    assert Manager._buffer.active_ep_size == Manager._buffer.connected_ep_size == 2
    assert not bool(smaller.query_fault())


def test_warming_up_masks_the_peers_that_are_there_and_no_others() -> None:
    found, buffer = made(2, 4, 4)
    exchange.exchange.drop([1])
    alone = manager(2, (0, 2, 3), 4)
    with alone.mask_remote_ranks():
        assert buffer.mask == [1, 1, 0, 1]
    assert buffer.mask == [0, 1, 0, 0]
    del found
