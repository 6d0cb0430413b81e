"""The next-character model of LEAF (Caldas et al., 2018) for Shakespeare: embedding, LSTM, linear head."""

import torch
from torch import Tensor, nn

from gluefl.errors import UsageError

LARGEST_SIZE = 2**16  # of a layer


def char_lstm(
    classes: int,
    channels: int,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    unrolled: bool = False,
) -> nn.Module:
    """Predict the next of `classes` characters from a sequence of them; text has no `channels`: ignored.

    torch's fused LSTM cannot be stacked by vmap, so clients are trained one after the other; with
    `unrolled=True` it is an explicit loop over time with the same weights, slower alone but stackable.
    """
    for label, count in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= LARGEST_SIZE:
            raise UsageError(
                f"model 'char_lstm' needs {label} to be a whole number from 1 to {LARGEST_SIZE}, found {count!r}"
            )
    if not isinstance(unrolled, bool):
        raise UsageError(f"model 'char_lstm' needs unrolled to be true or false, found {unrolled!r}")
    return CharLSTM(classes, embedding, hidden, layers, unrolled)


class CharLSTM(nn.Module):
    """Characters (N, T) as whole numbers to the scores (N, classes) of the character that follows."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int, unrolled: bool) -> None:
        super().__init__()
        self.stackable = unrolled
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, characters: Tensor) -> Tensor:
        """Only the last step is scored, as LEAF does."""
        x = self.embedding(characters)
        last = _last_output_unrolled(self.lstm, x) if self.stackable else self.lstm(x)[0][:, -1]
        scores: Tensor = self.head(last)
        return scores


def _last_output_unrolled(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """`lstm(x)[0][:, -1]`, written with operations that vmap supports."""
    state = x
    for layer in range(lstm.num_layers):
        weight, recurrent, bias, recurrent_bias = (
            getattr(lstm, f"{part}_l{layer}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        inputs = nn.functional.linear(x, weight, bias + recurrent_bias)  # of all times at once
        state = cell = inputs.new_zeros(inputs.shape[0], lstm.hidden_size)
        outputs = []
        for step in inputs.unbind(1):
            into, forget, value, out = (step + state @ recurrent.T).chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(value)
            state = torch.sigmoid(out) * torch.tanh(cell)
            outputs.append(state)
        x = torch.stack(outputs, dim=1)
    return state
