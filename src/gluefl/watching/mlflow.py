"""MLflow: a run in an experiment of a tracking server, a database or a folder."""

import importlib
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gluefl.errors import GlueFLError, Interrupted, MissingExtra
from gluefl.parameters import checked
from gluefl.watching import AfterRound, Watched
from gluefl.watching.tracking import followed, remembered

FILE = "mlflow-run.txt"  # in the run folder: the identity of the run
LONGEST = 6000  # characters of a parameter that MLflow takes
AT_ONCE = 100  # parameters


@checked
@dataclass(frozen=True)
class MLflow:
    """Logs to the tracking server at `uri`, or where the variable MLFLOW_TRACKING_URI says; a resumed run goes on."""

    experiment: str = "gluefl"
    uri: str | None = None
    name: str | None = None  # of the run; by default that of its folder

    def watch(self, run: Watched) -> AbstractContextManager[AfterRound]:
        """Log every round."""
        return followed(self.open, run)

    def open(self, run: Watched) -> "Logged":
        """Start a run in the experiment, or go on with the one that the folder names."""
        client = library().MlflowClient(tracking_uri=self.uri)
        try:
            known = client.get_experiment_by_name(self.experiment)
            experiment = known.experiment_id if known is not None else client.create_experiment(self.experiment)

            def create() -> str:
                return str(client.create_run(experiment, run_name=self.name or run.name).info.run_id)

            identity = remembered(run.folder, FILE, create)
            client.update_run(identity, status="RUNNING")
            history = client.get_metric_history(identity, "bytes/down")
        except library().exceptions.MlflowException as error:
            raise GlueFLError(f"MLflow cannot be used: {error}") from error
        return Logged(client, identity, max((metric.step for metric in history), default=0))


@dataclass(frozen=True)
class Logged:
    """A run of MLflow as a log."""

    client: Any
    identity: str
    last: int  # round that it holds; MLflow would keep a second value of the same round

    def settings(self, values: Mapping[str, Any]) -> None:
        """As parameters, which cannot be changed: those of a resumed run are there."""
        parameter = library().entities.Param
        try:
            given = self.client.get_run(self.identity).data.params
            new = [parameter(key, str(value)[:LONGEST]) for key, value in values.items() if key not in given]
            for start in range(0, len(new), AT_ONCE):
                self.client.log_batch(self.identity, params=new[start : start + AT_ONCE])
        except library().exceptions.MlflowException as error:
            raise GlueFLError(f"MLflow cannot be used: {error}") from error

    def scalars(self, values: Mapping[str, float], round: int) -> None:
        """As metrics, with the round as their step."""
        if round > self.last:
            now_ms, metric = int(time.time() * 1000), library().entities.Metric
            metrics = [metric(key, float(value), now_ms, round) for key, value in values.items()]
            try:
                self.client.log_batch(self.identity, metrics=metrics)
            except library().exceptions.MlflowException as error:  # a server that is away does not end a training
                warnings.warn(f"MLflow did not take round {round}: {error}", stacklevel=2)

    def close(self, error: BaseException | None) -> None:
        """Finished, stopped or failed."""
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        status = "FINISHED" if error is None else "KILLED" if stopped else "FAILED"
        try:
            self.client.set_terminated(self.identity, status)
        except library().exceptions.MlflowException as away:  # the result of the run is still to be written
            warnings.warn(f"MLflow did not take the end of the run ({status}): {away}", stacklevel=2)


def library() -> Any:
    """The module mlflow; an error that names the extra if it is missing."""
    try:
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise MissingExtra("mlflow", "MLflow") from error


TRACKER = MLflow  # for `--track mlflow`
