"""What a fleet does to whole rounds: the laws of the clock and of the bytes, with the real devices."""

from dataclasses import replace

import pytest

import gluefl
from gluefl import Arrivals, GlueFL, LocalSGD, Setting, Sticky, Uniform
from gluefl.errors import GlueFLError, UsageError
from gluefl.fleet import Fleet, Instant, Trip
from stubs import Blobs, mlp

SAMPLERS = {
    "uniform": Uniform(6, over_commitment=1.5),
    "sticky": Sticky(6, 12, 4, over_commitment=1.5),
    "10% split": Sticky(6, 12, 4, over_commitment=1.5, sticky_share=0.1),
}


def journal(sampler, devices, rounds=25, **arrivals):
    training = LocalSGD(steps=2, batch=10)
    setting = Setting(training=training, devices=devices, arrivals=Arrivals(**arrivals))
    return gluefl.train(mlp(), Blobs(), GlueFL(), sampler=sampler, rounds=rounds, setting=setting).journal


@pytest.mark.parametrize("authors", [False, True], ids=["first arrivals", "authors' arrivals"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_laws_of_the_clock_and_of_the_bytes(sampler, authors):
    lines = journal(sampler, Fleet("edge", "diurnal", seed=3, latency_s=0.05), authors_arrivals=authors)
    clock_s, held = 0.0, {}
    for line in lines:
        assert line["clock_s"] >= clock_s  # it never goes back
        assert line["clock_s"] == pytest.approx(clock_s + line["waited_s"] + line["round_s"])
        clock_s = line["clock_s"]
        if line["used"]:
            assert line["download_s"] + line["compute_s"] + line["upload_s"] == pytest.approx(line["round_s"])
        clients = line["clients"]
        used = sum(b for b, fate in zip(clients["down_bytes"], clients["fate"]) if fate == "used")
        assert (
            line["down_bytes"] - line["wasted_down_bytes"] == used <= line["down_bytes"] == sum(clients["down_bytes"])
        )
        assert (line["invited"], line["used"]) == (len(clients["id"]), clients["fate"].count("used"))
        for client, staleness in zip(clients["id"], clients["staleness"]):
            # What it holds is what it was last sent and finished: never newer, also after it was lost.
            if staleness is not None:
                assert line["round"] - 1 - staleness in held.get(client, set())
        for client in clients["id"]:
            held.setdefault(client, set()).add(line["round"] - 1)
    assert sum(line["used"] for line in lines) > 25


class Absent(Fleet):
    """Nobody is ever online, but the fleet says that it might change."""

    def is_online(self, clock_s):
        return lambda client: False

    def next_change_s(self, clock_s):
        return clock_s + 60


class Quitters(Fleet):
    """Everybody is online and leaves while it downloads."""

    def trip(self, client, clock_s, down_bytes, up_bytes, samples):
        return Trip(10.0, 1.0, 1.0, lost_s=4.0)


def test_nobody_online_ends_in_a_message_and_not_in_a_loop():
    with pytest.raises(GlueFLError, match="no client was online"):
        journal(SAMPLERS["sticky"], Absent("edge", "always"), rounds=1)


def test_nobody_arriving_changes_nothing_and_is_counted():
    lines = journal(SAMPLERS["sticky"], Quitters("edge", "always"), rounds=3)
    assert [line["used"] for line in lines] == [0, 0, 0]
    assert [line["update_density"] for line in lines] == [0, 0, 0]
    assert all("no client arrived" in line["notes"][0] for line in lines)
    assert [line["clock_s"] for line in lines] == [4.0, 8.0, 12.0]
    assert all(staleness is None for line in lines for staleness in line["clients"]["staleness"])  # never synchronised


@pytest.mark.parametrize("importance", ["uniform", "samples"])
def test_the_fastest_are_known_of_devices_that_take_time(tmp_path, importance):
    """And they are the first sticky group; without times the first clients would be called the fastest."""
    sampler, fleet = Sticky(3, 6, 2, initial="fastest"), Fleet("edge", "always", seed=3)
    setting = Setting(training=LocalSGD(steps=2, batch=10), devices=fleet, importance=importance)
    run = gluefl.train(mlp(), Blobs(), GlueFL(), sampler=sampler, rounds=1, setting=setting)
    seconds = [fleet.trip(client, 0.0, 10**7, 10**7, 200).arrival_s for client in range(Blobs().clients)]
    fastest = set(sorted(range(Blobs().clients), key=seconds.__getitem__)[:6])
    assert len(fastest & set(run.journal[0]["clients"]["id"])) == 2
    options = gluefl.Options(out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"'fastest' needs the speeds .* network = 'instant'"):
        gluefl.train(
            mlp(), Blobs(), GlueFL(), sampler=sampler, setting=replace(setting, devices=Instant()), options=options
        )
    assert not (tmp_path / "run").exists()


def test_over_commitment_shortens_rounds_and_costs_download():
    plain = journal(Uniform(6), Fleet("edge", "always", seed=1), rounds=40)
    more = journal(Uniform(6, over_commitment=1.5), Fleet("edge", "always", seed=1), rounds=40)
    assert sum(line["round_s"] for line in more) < sum(line["round_s"] for line in plain)
    assert sum(line["down_bytes"] for line in more) > sum(line["down_bytes"] for line in plain)
