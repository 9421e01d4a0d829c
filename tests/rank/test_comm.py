from comm_group import Shape, a_group


def test_result_equals_the_reference_for_random_routings() -> None:
    with a_group("shm", Shape()) as group:
        group.form(range(4))
        group.check_steps(0, 40, range(4))
