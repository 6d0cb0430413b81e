"""Who misses what: versions of coordinates and clients, against a history of masks kept naively."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gluefl.core.ledger import Ledger
from gluefl.vectors.sparse import Listed

SIZE = 12
positions = st.sets(st.integers(0, SIZE - 1)).map(lambda chosen: torch.tensor(sorted(chosen), dtype=torch.long))


@given(st.lists(st.tuples(st.sets(st.integers(0, 4)), positions), max_size=15))
def test_a_client_misses_what_changed_since_its_version(rounds) -> None:
    ledger, history, held = Ledger.init(SIZE), [], {}
    for synchronised, changed in rounds:
        ledger = ledger.synchronised(synchronised)
        held |= dict.fromkeys(synchronised, len(history))
        ledger = ledger.publish(ledger.changed_by(Listed(changed, torch.ones(len(changed)), SIZE)))
        history.append(set(changed.tolist()))
        assert ledger.version == len(history)
        for client in range(5):
            base = held.get(client)
            missed = set(range(SIZE)) if base is None else set().union(*history[base:])
            assert set(ledger.missing(ledger.base(client)).positions.tolist()) == missed
            assert ledger.base(client) == base
            assert ledger.staleness(client) == (None if base is None else len(history) - base)


def test_a_client_of_the_first_version_is_not_one_of_none() -> None:
    ledger = Ledger.init(SIZE).synchronised([3])
    assert ledger.base(3) == 0 and ledger.staleness(3) == 0 and ledger.missing(0).count == 0
    assert ledger.base(4) is None and ledger.missing(None).count == SIZE


def test_a_ledger_is_never_changed_in_place() -> None:
    ledger = Ledger.init(SIZE).synchronised([1])
    changed_at = ledger.changed_by(Listed(torch.tensor([2]), torch.ones(1), SIZE))
    ledger.publish(changed_at).synchronised([1, 2]).answered([1], [2])
    assert ledger.version == 0 and dict(ledger.held) == {1: 0} and not ledger.unused and not ledger.changed_at.any()


def test_whose_last_upload_was_not_used() -> None:
    ledger = Ledger.init(SIZE).answered(used=[1, 2], unused=[3, 4])
    assert ledger.unused == {3, 4}
    assert ledger.answered(used=[3], unused=[1]).unused == {1, 4}
