"""A Hugging Face model, trained by GlueFL: a small BERT that tells which of four topics a text is about.

    pip install transformers && python examples/huggingface_model.py

Nothing is downloaded: the model starts from its configuration, the texts are generated. With a network,
`AutoModelForSequenceClassification.from_pretrained(…)` takes its place, and the population `huggingface`
(docs/data.md) reads any data set of the hub that names its owners.
"""

import sys

import torch
from torch import nn

from gluefl import Evaluation, GlueFL, LocalSGD, Samples, Setting, Sticky, train

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError:
    sys.exit("This example needs transformers: pip install transformers")

WORDS, LENGTH, TOPICS = 200, 16, 4


class Texts:
    """120 writers. A topic prefers a quarter of the words; a writer likes some topics a little more."""

    clients, classes, shape = 120, TOPICS, (LENGTH,)

    def size(self, client):
        return 40

    def train(self, client):
        return self.texts(client, self.size(client), skew=0.5)

    def test(self):
        return self.texts(10_000, 400, skew=0.0)

    def transform(self, inputs):
        return inputs

    def texts(self, seed, count, skew):
        draw = torch.Generator().manual_seed(seed)
        taste = torch.softmax(skew * torch.randn(TOPICS, generator=draw), 0)
        labels = torch.multinomial(taste, count, replacement=True, generator=draw)
        words = torch.randint(WORDS, (count, LENGTH), generator=draw)
        own = labels[:, None] * (WORDS // TOPICS) + words % (WORDS // TOPICS)
        return Samples(torch.where(torch.rand(count, LENGTH, generator=draw) < 0.7, own, words), labels)


class Classifier(nn.Module):
    """gluefl's trainers call a module with inputs and take what it returns as outputs."""

    def __init__(self):
        super().__init__()
        # Dropout draws random numbers: without it, clients can be trained on all cores at once.
        config = BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=LENGTH, num_labels=TOPICS,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens):
        return self.bert(input_ids=tokens).logits


if __name__ == "__main__":
    torch.manual_seed(0)
    result = train(
        Classifier(),
        Texts(),
        GlueFL(),
        sampler=Sticky(cohort=10, sticky_size=40, sticky_cohort=8),
        rounds=80,
        setting=Setting(training=LocalSGD(steps=10, batch=20, lr=0.05), evaluation=Evaluation(every=4)),
    )
    summary = result.summary
    print(f"{summary['parameters']:,} weights, accuracy {summary['last_accuracy']:.1%}")
    print(f"a client downloads {summary['mean_download_share']:.1%} of the model in a round")
