"""The same two workloads on other simulators, if they are installed: pfl and Flower.

Each runs in a process of its own, pinned to one core, and reports the CPU seconds of its rounds, including child
processes. `pip install pfl==0.6.0` and `pip install 'flwr[simulation]'` install them.
"""

import glob
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gluefl.experiments.bench.progress import counted

WARM_UP = 2


def measure(rounds: int = 5) -> dict[str, Any]:
    """Mean CPU seconds per round of gluefl and of every peer, None for a peer that is not installed."""
    results: dict[str, Any] = {}
    for workload in ("w1", "w2"):
        count = rounds if workload == "w1" else 4 * rounds
        peers = counted(("gluefl", "pfl", "flower"), f"programs on {workload}")
        results[workload] = {name: _in_process(name, workload, count) for name in peers}
    return results


def _in_process(peer: str, workload: str, rounds: int) -> float | None:
    module = {"gluefl": "gluefl", "pfl": "pfl", "flower": "flwr"}[peer]
    if importlib.util.find_spec(module) is None:
        return None
    command = [sys.executable, "-m", "gluefl.experiments.bench.peers", peer, workload, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, env=offline())  # noqa: S603 - a module of our own
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        print(f"{peer} did not finish {workload}:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    seconds: list[float] = json.loads(lines[-1])["seconds"]
    return statistics.fmean(seconds[WARM_UP:])  # the kernel counts in hundredths, a round of W2 takes a few of them


def offline() -> dict[str, str]:
    """The environment of a peer: it reports nothing to anybody and uses one thread."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    quiet["RAY_worker_niceness"] = "0"  # as the workers of gluefl: equal shares of a busy machine
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1"}


def _gluefl(workload: str, rounds: int) -> list[float]:
    import numpy as np

    from gluefl.experiments.bench.cohort import gluefl_round
    from gluefl.experiments.bench.workloads import Noisy

    play, rng = gluefl_round(workload, Noisy()), np.random.default_rng(0)
    clock = _Clock()
    for _ in range(rounds + WARM_UP):
        play(rng)
        clock.tick()
    return clock.seconds


def _pfl(workload: str, rounds: int) -> list[float]:
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    from gluefl.experiments.bench import workloads as work

    inputs, labels = work.Noisy().everything

    class Learner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.model(workload)

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: Any, y: Any, eval: bool = True) -> dict[str, Any]:
            return {}

    clock = _Clock()

    class Ticker(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            clock.tick()
            return False, Metrics()

    learner = Learner()
    model = PyTorchModel(
        learner,
        local_optimizer_create=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=work.SGD.momentum),
        central_optimizer=torch.optim.SGD(learner.parameters(), 1.0),
    )
    sampler = get_user_sampler("minimize_reuse", list(range(work.CLIENTS)))
    data = FederatedDataset(lambda user: PyTorchTensorDataset((inputs[user], labels[user])), sampler)
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + WARM_UP,
            evaluation_frequency=10**6,
            train_cohort_size=work.COHORT,
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=5, local_learning_rate=work.SGD.lr, local_batch_size=work.SGD.batch),
        None,
        [Ticker()],
        send_metrics_to_platform=False,
    )
    return clock.seconds


def _flower(workload: str, rounds: int) -> list[float]:
    import torch
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from gluefl.experiments.bench import workloads as work

    client, server, clock = ClientApp(), ServerApp(), _Clock()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        copy = work.WORKER_COPIES[workload]
        (inputs, labels), net = copy.samples, copy.module
        number = context.node_config["partition-id"]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), work.SGD.lr, work.SGD.momentum)
        for _ in range(5):
            for batch in torch.split(torch.randperm(work.SAMPLES), work.SGD.batch):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(inputs[number][batch]), labels[number][batch])
                torch.autograd.backward(loss)
                optimizer.step()
        reply = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": work.SAMPLES}),
        }
        return FlowerMessage(content=RecordDict(reply), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=work.COHORT / work.CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=work.COHORT,
            min_available_nodes=work.CLIENTS,
        )
        arrays = ArrayRecord(work.model(workload).state_dict())
        strategy.start(
            grid=grid, initial_arrays=arrays, num_rounds=rounds + WARM_UP, evaluate_fn=lambda r, a: clock.tick()
        )

    resources = {
        "init_args": {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 500 * 2**20},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    }
    run_simulation(server, client, num_supernodes=work.CLIENTS, backend_config=resources)
    return clock.seconds[1:]  # the first tick is the evaluation before round 1


def idle_flower(workers: int, cohort: int, parameters: int, rounds: int, dense: bool) -> list[float]:
    """Seconds of rounds of Flower's simulation whose clients do nothing: the model goes out, and comes back if
    `dense`."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client, server, seconds = ClientApp(), ServerApp(), list[float]()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        reply = {"arrays": message.content["arrays"]} if dense else {"metrics": MetricRecord({"loss": 0.0})}
        return FlowerMessage(content=RecordDict(reply), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        weights = np.random.default_rng(0).standard_normal(parameters, dtype=np.float32)
        while len(nodes := list(grid.get_node_ids())) < cohort:
            time.sleep(0.1)
        for number in range(rounds):
            began = time.perf_counter()
            content = RecordDict({"arrays": ArrayRecord({"weights": Array(weights)})})
            messages = [FlowerMessage(content, node, "train", group_id=str(number)) for node in nodes]
            replies = list(grid.send_and_receive(messages))
            assert len(replies) == cohort and not any(reply.has_error() for reply in replies)
            if dense:
                weights = sum(reply.content["arrays"]["weights"].numpy() for reply in replies) / cohort
            seconds.append(time.perf_counter() - began)

    resources = {
        "init_args": {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 2**30},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    }
    run_simulation(server, client, num_supernodes=cohort, backend_config=resources)
    return seconds


class _Clock:
    """CPU seconds between ticks, of this process and its descendants."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = _tree_cpu_s()

    def tick(self) -> None:
        now = _tree_cpu_s()
        self.seconds.append(now - self._last)
        self._last = now


def _tree_cpu_s() -> float:
    if not os.path.exists("/proc/self/stat"):
        return time.process_time()
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue  # the process has ended
        pid = int(path.split("/")[2])
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = int(fields[11]) + int(fields[12])
    tree = [os.getpid()]
    for pid in tree:
        tree += children.get(pid, [])
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


PEERS: dict[str, Callable[[str, int], list[float]]] = {"gluefl": _gluefl, "pfl": _pfl, "flower": _flower}

if __name__ == "__main__":
    from gluefl.experiments.bench.cohort import pin

    pin(1)
    print(json.dumps({"seconds": PEERS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))}))
