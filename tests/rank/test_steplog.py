"""What a rank remembers of its steps."""

from elastic.rank.steplog import StepLog


def test_steps_are_given_in_order_and_only_those_after_the_moment() -> None:
    log = StepLog(8)
    for i in range(5):
        log.add(10.0 + i, 0.1 * i)
    assert log.since(0.0) == ((10.0, 11.0, 12.0, 13.0, 14.0), (0.0, 0.1, 0.2, 0.1 * 3, 0.4))
    assert log.since(12.0) == ((13.0, 14.0), (0.1 * 3, 0.4))
    assert log.since(14.0) == ((), ())


def test_a_full_log_keeps_the_newest_and_never_one_that_is_being_replaced() -> None:
    log = StepLog(4)
    for i in range(10):
        log.add(float(i), 0.0)
    assert log.since(-1.0)[0] == (7.0, 8.0, 9.0)
