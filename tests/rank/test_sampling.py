from collections import Counter

import torch

from elastic.protocol import Sampling
from elastic.rank.sampling import choose, sample, uniform
from elastic.rank.scheduler import Sample

ROW = torch.tensor([1.0, 3.0, 0.5, 2.0, -1.0])


def draws(sampling: Sampling, n: int) -> Counter[int]:
    return Counter(sample(ROW, sampling, position) for position in range(n))


def chosen(rows: torch.Tensor, samples: list[Sample]) -> list[int]:
    return choose(rows.argmax(-1).tolist(), rows, samples)


def test_only_the_rows_of_samples_are_answered_greedy_ones_by_the_step_itself() -> None:
    hot = Sampling(temperature=1.0, seed=3)
    samples = [Sample(2, 0, Sampling()), Sample(0, 1, hot)]
    assert choose([9, 8, 7], ROW.expand(3, -1), samples) == [7, sample(ROW, hot, 1)]


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    tied = torch.zeros(1000)
    tied[[7, 400]] = 2.0
    assert sample(tied, Sampling(), 3) == 7


def test_a_replay_on_another_rank_draws_the_same_tokens() -> None:
    sampling = Sampling(temperature=1.0, seed=42)
    rows = ROW.expand(20, -1)
    whole = chosen(rows, [Sample(i, i, sampling) for i in range(20)])
    replayed = chosen(rows[8:], [Sample(i, 8 + i, sampling) for i in range(12)])
    assert replayed == whole[8:]
    assert len(set(whole)) > 1


def test_neighbours_do_not_disturb_a_draw() -> None:
    hot = Sampling(temperature=1.3, top_p=0.9, seed=5)
    alone = chosen(ROW[None], [Sample(0, 4, hot)])
    rows = torch.stack((ROW.flip(0), ROW, ROW * 2))
    among = chosen(rows, [Sample(0, 4, Sampling()), Sample(1, 4, hot), Sample(2, 9, Sampling(temperature=0.5, seed=5))])
    assert among[1:2] == alone


def test_another_seed_is_another_answer_and_negative_seeds_are_fine() -> None:
    answers = {
        tuple(sample(ROW, Sampling(temperature=1.0, seed=seed), p) for p in range(30)) for seed in (-1, 0, 1, 2**63)
    }
    assert len(answers) == 4


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    n = 4000
    seen = draws(Sampling(temperature=2.0, seed=1), n)
    for token, p in enumerate(torch.softmax(ROW / 2.0, -1).tolist()):
        assert abs(seen[token] / n - p) < 0.03


def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass() -> None:
    probs = torch.softmax(ROW, -1)
    assert probs[1] < 0.7 < probs[1] + probs[3]
    assert set(draws(Sampling(temperature=1.0, top_p=0.7, seed=1), 500)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_p=0.0, seed=1), 50)) == {1}
    assert set(draws(Sampling(temperature=1.0, top_p=1.0, seed=1), 3000)) == {0, 1, 2, 3, 4}


def test_a_tiny_temperature_is_greedy_and_not_a_number_error() -> None:
    assert set(draws(Sampling(temperature=1e-6, seed=3), 50)) == {1}


def test_uniform_numbers_fill_the_unit_interval() -> None:
    numbers = [uniform(7, i) for i in range(2000)]
    assert all(0 <= x < 1 for x in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03
    assert min(numbers) < 0.01
    assert max(numbers) > 0.99
