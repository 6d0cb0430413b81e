"""Propositions 1 and 2 of the paper, and the variance factor of Theorem 2."""

import math


def uniform_return(clients: int, cohort: int, r: int) -> float:
    """Proposition 1: the probability that a client just sampled is next sampled after exactly r rounds."""
    p = cohort / clients
    return p * (1 - p) ** (r - 1)


def sticky_return(clients: int, cohort: int, sticky_size: int, sticky_cohort: int, r: int) -> float:
    """Proposition 2: the same for a client of the sticky group, sampled there or outside after an eviction."""
    stay = 1 - cohort / sticky_size  # neither sampled nor evicted
    leave = (cohort - sticky_cohort) / sticky_size
    back = (cohort - sticky_cohort) / (clients - sticky_size)
    inside = sticky_cohort / sticky_size * stay ** (r - 1)
    # Σ over the round of the eviction: it stayed r−i−1 rounds, left, then missed i−1 rounds outside.
    outside = sum(leave * back * stay ** (r - i - 1) * (1 - back) ** (i - 1) for i in range(1, r))
    return inside + outside


def mean_return_rounds(clients: int, cohort: int) -> float:
    """Both propositions: a client is sampled every N/K rounds, sticky or not."""
    return clients / cohort


def variance_factor(clients: int, cohort: int, sticky_size: int, sticky_cohort: int, squares: float = 0.0) -> float:
    """A of Theorem 2: K/N (S²/C + (N−S)²/(K−C)) Σ p_i². 1 for uniform sampling and equal importance."""
    squares = squares or 1 / clients
    if sticky_size == 0:
        return clients * squares
    spread = sticky_size**2 / sticky_cohort + (clients - sticky_size) ** 2 / (cohort - sticky_cohort)
    return cohort / clients * spread * squares


def horizon(clients: int, cohort: int, sticky_size: int, sticky_cohort: int) -> int:
    """App. A.3: up to this many rounds a sticky client returns with a higher probability than a uniform one."""
    gain = sticky_cohort * clients / (sticky_size * cohort)
    if gain <= 1 or sticky_size <= cohort:
        return 0 if gain <= 1 else 1
    decay = sticky_size * (clients - cohort) / (clients * (sticky_size - cohort))
    return 1 + math.floor(math.log(gain) / math.log(decay))
