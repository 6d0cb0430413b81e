"""The installation looks at itself, and shells complete its commands."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gluefl.cli import main
from gluefl.errors import pip_install
from gluefl.experiments import doctor
from gluefl.experiments.studies import catalogue


def test_a_sound_installation_is_told_so_in_json_and_by_the_exit_code() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.stdout)
    states = {one["part"]: one["state"] for one in found["findings"]}
    assert found["ok"] == (done.exit_code == 0) == ("failed" not in states.values())
    assert all(states[name] == "ok" for name in ("gluefl", "python", "torch", "cpu", *doctor.SELF_TESTS))
    assert {"report", "flower", "privacy"} <= states.keys() and "dev" not in states


def test_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name in ("matplotlib", "jinja2"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setattr(doctor, "self_test", lambda: iter(()))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1 and "pip install 'gluefl[report]'" in done.stdout
    states = {one.part: one.state for one in doctor.examine()}
    assert states["report"] == "absent" and states["jinja2"] == "failed"  # one is optional, the other is not


def test_the_line_that_installs_is_for_the_python_that_runs(monkeypatch, tmp_path) -> None:
    own, other = tmp_path / "of its own" / "bin", tmp_path / "bin"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "pip").write_text("")
        (folder / "pip").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(own))
    assert pip_install("a>=1") == "pip install 'a>=1'"
    monkeypatch.setenv("PATH", str(other))
    assert pip_install("a") == f"'{own}/python' -m pip install 'a'"
    monkeypatch.chdir(tmp_path)
    assert pip_install("a") == "'of its own/bin/python' -m pip install 'a'"


def test_a_self_test_that_fails_is_a_finding(monkeypatch) -> None:
    def broken(folder) -> str:
        raise AssertionError("a resumed run ended with another model")

    monkeypatch.setattr(doctor, "_resume", broken)
    first, second = doctor.self_test()
    assert first.state == "ok" and second.state == "failed" and "another model" in second.detail
    assert not doctor.healthy([first, second]) and doctor.healthy([first, replace(first, state="absent")])


@given(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_bounds_of_versions_are_those_of_their_numbers(own, bound) -> None:
    version, limit = (".".join(map(str, numbers)) for numbers in (own, bound))
    assert doctor.within(version + "+cpu", f">={limit}") == (own >= bound)
    assert doctor.within(version, f"<{limit}") == (own < bound)
    assert doctor.within(version, f">={limit},<9") == (own >= bound)
    assert doctor.within(version + ".0", f"=={limit}") == (own == bound)


def completed(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    asked = {"_GLUEFL_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", "from gluefl.cli import main; main(prog_name='gluefl')"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    return [line.split(",", 1)[1] for line in done.stdout.splitlines()]


def test_shells_complete_commands_options_and_studies() -> None:
    assert completed("gluefl", "do") == ["doctor"]
    assert "--seeds" in completed("gluefl", "demo", "--see")
    assert completed("gluefl", "study", "lea") == [name for name in catalogue.names() if name.startswith("lea")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_script(shell) -> None:
    done = CliRunner().invoke(main, [], prog_name="gluefl", env={"_GLUEFL_COMPLETE": f"{shell}_source"})
    assert "_GLUEFL_COMPLETE" in done.output and shell in done.output
