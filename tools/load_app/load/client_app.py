"""The client's side: the real mod around an app that does not train."""

from flwr.clientapp import ClientApp

from gluefl.flower import GlueFLMod
from load.task import PARAMETERS, initial_model, step


def app_of(parameters: int) -> ClientApp:
    """The app for a model of this size."""
    made = ClientApp(mods=[GlueFLMod(initial=lambda: initial_model(parameters))])
    made.train()(step)
    return made


app = app_of(PARAMETERS)  # of a real SuperNode
