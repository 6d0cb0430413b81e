"""A real federation on loopback: SuperLink, three SuperNodes, TLS and node keys, three rounds."""

import importlib.util
import shutil
import subprocess

import pytest

pytest.importorskip("flwr")

from stubs import ROOT


def _kills():
    spec = importlib.util.spec_from_file_location("flower_kills", ROOT / "tools" / "flower_kills.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_lines() -> list[str]:
    quickstart = ROOT / "examples" / "flower-quickstart"
    pairs = [("ordinary/quickstart", "quickstart"), ("ordinary/pyproject.toml", "pyproject.toml")]
    lines = []
    for old, new in pairs:
        done = subprocess.run(
            ["diff", "-ru", "-x", "__pycache__", quickstart / old, quickstart / new], capture_output=True, text=True
        )
        lines += [line for line in done.stdout.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return lines


def test_an_app_adopts_gluefl_in_ten_lines() -> None:
    assert 0 < len(changed_lines()) <= 10


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="needs openssl and ssh-keygen")
def test_three_nodes_three_rounds_with_tls_and_keys(tmp_path) -> None:
    federation = _kills().Loopback(tmp_path, nodes=3)
    out = tmp_path / "run"
    try:
        federation.start_superlink()
        stranger = federation.start("stranger", "node", "0")  # its key is not registered yet
        federation.wait("the stranger to be refused", lambda: stranger.poll() is not None, 60)
        federation.call("register")
        for node in range(3):
            federation.start(f"node-{node}", "node", str(node))
        run = federation.run(num_server_rounds=3, cohort=2, sticky_size=2, sticky_cohort=1, out=str(out))
        federation.wait("the run", lambda: run.poll() is not None, 300)
        lines = federation.journal()
        assert [line["used"] for line in lines] == [2, 2, 2], (tmp_path / "run.log").read_text()
        assert not any(line["incidents"] for line in lines)
        assert len(federation.replicas()) >= 2 and not federation.wrong_replicas()
        traffic = federation.counters()[0]["network-traffic"]
        messages = sum(line["invited"] for line in lines)
        for name, ours in (("outbound-bytes", "down_bytes"), ("inbound-bytes", "up_bytes")):
            counted, told = traffic[name], sum(line[ours] for line in lines)
            assert told <= counted <= 1.02 * told + 4096 * messages, f"{name}: Flower {counted}, journal {told}"
    finally:
        federation.stop()
