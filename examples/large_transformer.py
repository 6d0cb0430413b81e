"""A transformer of 100 million parameters, trained in full under lean, and what a round takes.

    pip install transformers && python examples/large_transformer.py

Random weights, random texts: it measures memory, seconds and bytes, not accuracy. `--layers 2` makes it small.
"""

import argparse
import json
import resource
import sys
import time

import torch
from torch import nn

from gluefl import Evaluation, Lean, LocalSGD, Options, Samples, Setting, Uniform, train

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("This example needs transformers: pip install transformers")


class Texts:
    """Sequences of random words; the label is the word that follows."""

    def __init__(self, words, length, clients=1000):
        self.clients, self.classes, self.shape = clients, words, (length,)

    def size(self, client):
        return 4

    def train(self, client):
        return self.texts(client)

    def test(self):
        return self.texts(-1)

    def transform(self, inputs):
        return inputs

    def texts(self, client):
        draw = torch.Generator().manual_seed(client + 1)
        texts = torch.randint(self.classes, (4, self.shape[0] + 1), generator=draw)
        return Samples(texts[:, :-1], texts[:, -1])


class NextWord(nn.Module):
    """gluefl's trainers call a module with inputs and take what it returns as outputs."""

    def __init__(self, words, length, layers, width):
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, inputs):
        return self.model(inputs, logits_to_keep=1).logits[:, -1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--cohort", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = NextWord(options.words, options.length, options.layers, options.width)
    began = time.perf_counter()
    result = train(
        model,
        Texts(options.words, options.length),
        Lean(),
        sampler=Uniform(cohort=options.cohort),
        rounds=options.rounds,
        setting=Setting(training=LocalSGD(steps=1, batch=2, lr=0.01), evaluation=Evaluation(every=options.rounds)),
        options=Options(trainer="loop"),  # one copy of the model; torch uses all cores for one client
    )
    lines = result.journal
    print(
        json.dumps(
            {
                "parameters": result.summary["parameters"],
                "cohort": options.cohort,
                "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
                "seconds": time.perf_counter() - began,
                "seconds_a_round": [line["wall_s"] for line in lines],
                "down_bytes_a_round": [line["down_bytes"] for line in lines],
                "up_bytes_a_round": [line["up_bytes"] for line in lines],
                "fedavg_bytes_of_a_model": result.summary["model_bytes"],
                "update_density": [line["update_density"] for line in lines],
                "loss": [line["loss"] for line in lines],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
