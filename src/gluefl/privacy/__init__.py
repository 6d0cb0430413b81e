"""Differential privacy of clients against those who receive the model: clipping, noise, and what they amount to.

`docs/privacy.md` says what is protected from whom.
"""

from gluefl.privacy.accounting import amplified_epsilon, epsilon, participations
from gluefl.privacy.mechanism import Private, largest_weight

__all__ = ["Private", "amplified_epsilon", "epsilon", "largest_weight", "participations"]
