"""The round board over a transport: one word per peer and parity of the round, in the inbox of each peer."""

from collections.abc import Collection

from elastic.rank.comm.transport import BOARD_EVEN, Transport


class Board:
    """See `RoundBoard`. Shares inbox, connections and bell with the EP backend of the same transport: `connect` of the
    backend connects the board too, and `clean` of the backend also forgets every announcement."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._words = transport.inbox.words

    def announce(self, round_: int, has_work: bool, peers: Collection[int]) -> None:
        word = _word(round_, has_work)
        for peer in peers:
            if peer != self._transport.rank:
                self._transport.post(peer, BOARD_EVEN + round_ % 2, word)

    def any_work(self, round_: int, peers: Collection[int]) -> bool:
        words, busy = self._words[BOARD_EVEN + round_ % 2], _word(round_, True)
        return any(words[peer] == busy for peer in peers)

    def begun(self, round_: int, peers: Collection[int]) -> bool:
        words, either = self._words[BOARD_EVEN + round_ % 2], (_word(round_, False), _word(round_, True))
        return any(words[peer] in either for peer in peers)

    def ticket(self) -> int:
        return self._transport.ticket()

    def wait(self, ticket: int, timeout_s: float) -> None:
        self._transport.wait(ticket, timeout_s)

    def ring(self) -> None:
        self._transport.ring()


def _word(round_: int, has_work: bool) -> int:
    # Never zero, which means that nothing was announced.
    return (round_ + 1) << 1 | int(has_work)
