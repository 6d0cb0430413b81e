"""ε for a δ: what clipping and noise amount to over the rounds in which a client takes part.

Every participation counts in full, whoever was invited how. Only for uniform sampling there is also a bound that uses
the chance of not being invited; sticky sampling has no such bound, because a client that was used is likely to be used
again (docs/privacy.md).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gluefl.core.sampling import Sampler, Uniform
from gluefl.errors import MissingExtra, UsageError
from gluefl.parameters import Count, OpenShare, Positive, check
from gluefl.storage.journal import clients_of


def participations(journal: Iterable[Mapping[str, Any]]) -> int:
    """The most rounds in which one client's upload was used, from the lines of a journal: `result.journal`."""
    counts = Counter[int]()
    for line in journal:
        clients = clients_of(line)
        counts.update(client for client, fate in zip(clients["id"], clients["fate"]) if fate == "used")
    return max(counts.values(), default=0)


def epsilon(noise: float, participations: int, delta: float) -> float:
    """ε of a client that takes part this often; for a plan, the number of rounds is the most there can be.

    Two neighbouring runs differ in one client, whose updates are zero in one of them. The accountant is
    `dp-accounting`'s of privacy loss distributions.

    >>> epsilon(noise=1.0, participations=12, delta=1e-5)
    """
    check("epsilon", noise=(Positive, noise), participations=(Count, participations), delta=(OpenShare, delta))
    library = _library()
    event = library.dp_event.GaussianDpEvent(noise)
    accountant = library.pld.PLDAccountant()
    accountant.compose(library.dp_event.SelfComposedDpEvent(event, participations))
    return float(accountant.get_epsilon(delta))


def amplified_epsilon(noise: float, sampler: Sampler, clients: int, rounds: int, delta: float) -> float:
    """ε where K of N clients are drawn uniformly and secretly in every round, and all that are drawn are used.

    It protects from those who see the model alone: whoever sees the messages knows who took part. Neighbouring runs
    differ in all of one client's updates, which are replaced by others: twice the distance of `epsilon`. The bound is
    the one for sampling without replacement (Wang, Balle, Kasiviswanathan, AISTATS 2019).
    """
    check("amplified_epsilon", noise=(Positive, noise), rounds=(Count, rounds), delta=(OpenShare, delta))
    if not isinstance(sampler, Uniform):
        raise UsageError(
            f"{type(sampler).__name__} does not draw clients uniformly: there is no amplification to count. Use "
            "epsilon with the participations of the journal."
        )
    if sampler.over_commitment != 1:
        raise UsageError(
            f"over_commitment = {sampler.over_commitment}: the fastest of the invited clients are used, which is no "
            "uniform choice. Use epsilon with the participations of the journal."
        )
    sampler.check(clients)
    library = _library()
    one = library.dp_event.SampledWithoutReplacementDpEvent(
        clients, sampler.cohort, library.dp_event.GaussianDpEvent(noise / 2)
    )
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    accountant.compose(library.dp_event.SelfComposedDpEvent(one, rounds))
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingExtra("privacy", "accounting for privacy") from error
    return dp_accounting
