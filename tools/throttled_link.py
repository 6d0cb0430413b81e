"""Seconds over slow links, lean beside Flower's own FedAvg: `python tools/throttled_link.py [--rounds 5]`.

The federation of `flower_traffic.py` (a SuperLink and five SuperNodes with TLS and keys on loopback, five million
weights, real training), but every node reaches the SuperLink through a proxy of its own that passes so many bits per
second in each direction, 20 Mbit/s down and 5 Mbit/s up by default. Seconds are those of a whole run, from `flwr run`
to its end; bytes are those that passed the proxies, with TLS, HTTP/2 and heartbeats. `--down 0 --up 0` removes the
limit: what is left is Flower, training and the strategies.
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_kills import Loopback, free_ports
from flower_traffic import APP, RUNS, play

PIECE = 16 * 1024  # bytes that pass at once: 26 ms of 5 Mbit/s
COMPARED = ("FedAvg of Flower", "lean, version 0 known")


@dataclass
class Direction:
    """One direction of a link, shared by all connections of its node."""

    mbit_per_s: float  # 0: no limit
    carried_bytes: int = 0
    free_at: float = 0.0  # when the last piece will have passed

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, at the rate of the link, until one side closes."""
        clock = asyncio.get_running_loop()
        try:
            while piece := await reader.read(PIECE):
                self.carried_bytes += len(piece)
                if self.mbit_per_s:
                    seconds = 8 * len(piece) / (self.mbit_per_s * 1e6)
                    self.free_at = max(clock.time(), self.free_at) + seconds
                    await asyncio.sleep(self.free_at - clock.time())
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # a killed node
        finally:
            writer.close()


@dataclass(frozen=True)
class Link:
    """A proxy between one node and the SuperLink."""

    down: Direction
    up: Direction

    async def open(self, port: int, superlink_port: int) -> None:
        """Listen on a port of this machine."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                from_superlink, to_superlink = await asyncio.open_connection("127.0.0.1", superlink_port, limit=PIECE)
            except OSError:  # the SuperLink has ended: so does the node's connection
                writer.close()
                return
            await asyncio.gather(self.up.carry(reader, to_superlink), self.down.carry(from_superlink, writer))

        await asyncio.start_server(connect, "127.0.0.1", port, limit=PIECE)


def open_links(links: Sequence[Link], first_port: int, superlink_port: int) -> None:
    """Serve all links in a thread that ends with the program."""
    loop = asyncio.new_event_loop()
    for node, link in enumerate(links):
        loop.run_until_complete(link.open(first_port + node, superlink_port))
    threading.Thread(target=loop.run_forever, daemon=True).start()


def measured(federation: Loopback, links: Sequence[Link], name: str, rounds: int) -> dict[str, Any]:
    """One run, and what passed the links meanwhile."""

    def carried() -> tuple[int, int]:
        return sum(link.down.carried_bytes for link in links), sum(link.up.carried_bytes for link in links)

    before, began = carried(), time.monotonic()
    row = play(federation, name, rounds)
    row["seconds"] = time.monotonic() - began
    row["link_down_mb"], row["link_up_mb"] = ((now - then) / 1e6 for now, then in zip(carried(), before))
    print(
        f"{name:24} {row['seconds']:8.0f} {row['seconds'] / rounds:8.1f} {row['link_down_mb']:9.2f} "
        f"{row['link_up_mb']:9.2f} {row['accuracy']:9.3f}",
        flush=True,
    )
    return row


def show_header(options: argparse.Namespace) -> None:
    """The head of the table, whose rows appear as runs end."""
    rates = " and ".join(
        f"{rate:g} Mbit/s {way}" if rate else f"no limit {way}"
        for rate, way in ((options.down, "down"), (options.up, "up"))
    )
    print(f"{options.rounds} rounds, {options.nodes} nodes, each behind a link of {rates}:")
    print(f"{'':24} {'seconds':>8} {'a round':>8} {'MB down':>9} {'MB up':>9} {'accuracy':>9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--down", type=float, default=20.0, help="Mbit/s to a node; 0: no limit")
    parser.add_argument("--up", type=float, default=5.0, help="Mbit/s from a node; 0: no limit")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(COMPARED))
    parser.add_argument("--work", type=Path, default=None, help="keep keys, logs and journals here")
    options = parser.parse_args()
    work = (options.work or Path(tempfile.mkdtemp(prefix="gluefl-link-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    federation = Loopback(work, options.nodes, APP)
    links = [Link(Direction(options.down), Direction(options.up)) for _ in range(options.nodes)]
    try:
        federation.start_superlink()
        first_port = free_ports(options.nodes + 1)  # the SuperLink's port is in use now: beyond those of the nodes
        open_links(links, first_port, int(federation.environment["PORT"]))
        federation.environment["LINK"] = str(first_port)
        federation.start_nodes()
        show_header(options)
        rows = {name: measured(federation, links, name, options.rounds) for name in options.runs}
    finally:
        federation.stop()
    print(json.dumps({"rounds": options.rounds, "down": options.down, "up": options.up, "rows": rows}))


if __name__ == "__main__":
    main()
