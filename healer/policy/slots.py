"""Slots that no rule and no label tells apart: what holds for one of them holds for all."""

from collections.abc import Iterable
from itertools import pairwise

from healer.policy.schema import Policy, Span


def slots_alike(policy: Policy) -> tuple[Span, ...]:
    """All slots of the target, ascending. The number of ranges depends on the file and not on the number of slots."""
    most = policy.spec.target.max_ranks
    named = [span for entry in policy.spec.target.slot_labels for span in entry.slots]
    named += [span for rule in policy.spec.healing.rules for span in rule.match.slot or ()]
    ends = {0, most, *(span.first for span in named), *(span.last + 1 for span in named)}
    return tuple(Span(first, after - 1) for first, after in pairwise(sorted(end for end in ends if end <= most)))


def show_spans(spans: Iterable[Span]) -> str:
    """As "slot 3" or "slots 0-3, 6"; neighbours are joined."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].last + 1 == span.first:
            joined[-1] = Span(joined[-1].first, span.last)
        else:
            joined.append(span)
    one = len(joined) == 1 and joined[0].first == joined[0].last
    return f"slot{'' if one else 's'} {', '.join(map(str, joined))}"
