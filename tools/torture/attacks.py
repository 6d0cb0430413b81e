"""Who attacks in which round of a loopback federation, and how: the attacks of the tests, a node after the other."""

from test_flower_hostile import BY_BYTES, BY_TRAINING, CASES, STRATEGIES, Attack

NODES = 5
__all__ = ["NODES", "STRATEGIES", "attack_on", "hostile_in", "ways_of"]


def ways_of(name: str) -> list[str]:
    """The ways in which a federation with this strategy is attacked. Before the first attack is an honest round."""
    ways = [way for strategy, way in CASES if strategy == name]
    return ["", *ways, ""]


def hostile_in(round: int) -> int:
    """The node whose turn it is."""
    return round % NODES


def attack_on(name: str, round: int, place: int, way: str | None = None) -> tuple[str, Attack]:
    """The way in which a node attacks in a round, "" if it is honest then."""
    if way is None:
        way = ways_of(name)[round - 1] if place == hostile_in(round) else ""
    return way, Attack() if way in ("", "replayed") else {**BY_TRAINING, **BY_BYTES}[way]
