"""Adapters of a language model, federated over the roles of a play: lean beside FedAvg and full fine-tuning.

    pip install 'gluefl[adapters]'
    python examples/lora.py --text tinyshakespeare_by_role.csv.gz

A causal transformer starts from its configuration, nothing is downloaded. It is trained centrally on every fifth role;
then LoRA adapters are trained by the other roles, each of which is a client. The frozen base is held once, never sent
and not saved. Without --text the roles speak generated sentences. `--model gpt2` takes a model of the hub instead,
where there is a network; `--size 100M` shows what a large base needs.
"""

import argparse
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gluefl import Averaging, Evaluation, FedAvg, Lean, LocalAdam, Samples, Setting, Sticky, Uniform, train
from gluefl.populations.shakespeare import load

try:
    import transformers
except ImportError:
    sys.exit("This example needs transformers: pip install 'gluefl[adapters]'")

SIZES = {"small": (64, 2), "10M": (256, 9), "100M": (768, 12)}  # width, layers


class Roles:
    """Clients with windows of tokens; the label of a token is the next one."""

    def __init__(self, tokens: list[Tensor], test: list[Tensor], classes: int, window: int) -> None:
        self.own = [one for one in (windows(role, window) for role in tokens) if len(one)]
        self.rest = torch.cat([windows(role, window) for role in test])
        self.clients, self.classes, self.shape = len(self.own), classes, (window,)

    def size(self, client: int) -> int:
        return len(self.own[client])

    def train(self, client: int) -> Samples:
        return Samples(self.own[client][:, :-1], self.own[client][:, 1:])

    def test(self) -> Samples:
        return Samples(self.rest[:, :-1], self.rest[:, 1:])

    def transform(self, inputs: Tensor) -> Tensor:
        return inputs


class Logits(nn.Module):
    """gluefl calls a module with inputs and takes what it returns as outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class LoRA(nn.Module):
    """A frozen layer with a correction of low rank, where peft is not installed."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def windows(tokens: Tensor, length: int) -> Tensor:
    """Consecutive windows of one token more than the model reads."""
    return tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


def token_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens; its exponential is the perplexity."""
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


def right_tokens(outputs: Tensor, labels: Tensor) -> Tensor:
    """The share of tokens of every window that are predicted."""
    return (outputs.argmax(-1) == labels).float().mean(-1)


def generated(folder: str) -> Path:
    """A play of 60 roles, each with favourite words, for a machine without the text."""
    draw = torch.Generator().manual_seed(1)
    subjects = ["king", "fool", "queen", "ghost", "lord", "nurse", "friar"]
    verbs = ["loves", "fears", "mourns", "hails", "seeks", "flees"]
    objects = ["the night", "my crown", "a rose", "this sword", "thy grave", "the sea", "our feast"]
    speeches = []
    for role in range(60):
        tastes = [torch.softmax(torch.randn(len(words), generator=draw), 0) for words in (subjects, verbs, objects)]
        picks = [torch.multinomial(taste, 80, replacement=True, generator=draw).tolist() for taste in tastes]
        lines = [f"the {subjects[s]} {verbs[v]} {objects[o]}." for s, v, o in zip(*picks)]
        speeches.append(f"ROLE {role}:\n" + "\n".join(lines))
    path = Path(folder) / "play.txt"
    path.write_text("\n\n".join(speeches), encoding="utf-8")
    return path


def texts(path: Path) -> tuple[list[str], list[str], tuple[str, ...]]:
    """What every role says, the end of it for the test, and the alphabet."""
    data = load(path, window=64, stride=64, min_characters=1000)
    spell = lambda samples: "".join(data.label_names[i] for i in samples.inputs.flatten().tolist())
    return [spell(data.train(role)) for role in range(data.clients)], [spell(data.test())], data.label_names


def language_model(options: argparse.Namespace, alphabet: tuple[str, ...]):
    """A model of the hub with its tokeniser, or one from a configuration that reads characters."""
    if options.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, torch_dtype=torch.float32)
        return model, lambda text: torch.tensor(tokenizer(text)["input_ids"]), model.config.vocab_size
    width, layers = SIZES[options.size]
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64), max_position_embeddings=options.window,
    )  # fmt: skip
    index = {character: i for i, character in enumerate(alphabet)}
    model = transformers.LlamaForCausalLM(config)
    return model, lambda text: torch.tensor([index[character] for character in text]), len(alphabet)


def train_centrally(model: nn.Module, tokens: Tensor, options: argparse.Namespace) -> None:
    """Plain AdamW on the words of the roles that are no clients."""
    rows, optimizer = windows(tokens, options.window), torch.optim.AdamW(model.parameters(), 3e-3)
    draw = torch.Generator().manual_seed(0)
    for step in range(options.central_steps):
        batch = rows[torch.randint(len(rows), (32,), generator=draw)]
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / options.central_steps) + 1e-4
        optimizer.zero_grad()
        token_loss(model(input_ids=batch[:, :-1]).logits, batch[:, 1:]).backward()
        optimizer.step()


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model, frozen, with adapters at all of its linear layers but the last."""
    torch.manual_seed(1)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear) and name != "lm_head":
                    setattr(module, name, LoRA(child, rank))
        return model
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def federate(name: str, model: nn.Module, roles: Roles, strategy, sampler, lr: float, options: argparse.Namespace):
    """One run: its weights, and perplexity, bytes down and bytes up after every evaluation."""
    began = time.perf_counter()
    result = train(
        Logits(model), roles, strategy, sampler=sampler, rounds=options.rounds,
        setting=Setting(
            seed=options.seed, training=LocalAdam(steps=options.steps, batch=options.batch, lr=lr), loss=token_loss,
            initial="known", averaging=Averaging(0.9),
            evaluation=Evaluation(every=options.every, metric=right_tokens, batch=64),
        ),
    )  # fmt: skip
    points, down, up = [], 0, 0
    for line in result.journal:
        down, up = down + line["down_bytes"], up + line["up_bytes"]
        if line.get("test_loss") is not None:
            points.append((math.exp(line["test_loss"]), line["round"], down, up))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = time.perf_counter() - began
    print(f"{name}: {seconds:.0f} s, peak memory of the process {peak:.2f} GiB", file=sys.stderr)
    return name, result.summary["parameters"], points


def table(runs: list, start: float) -> None:
    """Bytes at the perplexity that both runs of adapters reach."""
    target = max(min(point[0] for point in points) for _, _, points in runs[:2])
    print(f"perplexity before: {start:.3f}; at {target:.3f}:")
    print(f"{'run':32}{'weights':>12}{'best':>8}{'rounds':>8}{'download':>12}{'upload':>12}{'FedAvg down':>13}")
    reached = [next((point for point in points if point[0] <= target), None) for _, _, points in runs]
    for (name, weights, points), point in zip(runs, reached):
        row = f"{name:32}{weights:>12,}{min(point[0] for point in points):>8.3f}"
        if point is None:
            print(row + f"{'–':>8}")
            continue
        _, rounds, down, up = point
        ratio = f"{reached[1][2] / down:.1f} ×" if reached[1] else "–"
        print(row + f"{rounds:>8}{down / 1e6:>9.3f} MB{up / 1e6:>9.3f} MB{ratio:>13}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a CSV with the columns role and text, or a play")
    parser.add_argument("--model", help="the name of a causal model of the hub")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--runs", type=int, default=3, help="1: lean; 2: and FedAvg; 3: and full fine-tuning")
    for name, default in {
        "rounds": 20, "cohort": 20, "steps": 5, "batch": 8, "window": 64, "rank": 8, "every": 2, "central-steps": 600,
        "seed": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.005, help="of adapters; a fifth of it for full fine-tuning")
    options = parser.parse_args()
    if min(options.rounds, options.cohort, options.steps, options.batch, options.window, options.rank) < 1:
        parser.error("rounds, cohort, steps, batch, window and rank must be 1 or more")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        spoken, test, alphabet = texts(options.text or generated(folder))
    model, tokenise, classes = language_model(options, alphabet)
    tokens = [tokenise(text) for text in spoken]
    if not options.model:
        train_centrally(model, torch.cat(tokens[::5]), options)
    clients = [role for number, role in enumerate(tokens) if number % 5]
    roles = Roles(clients, [tokenise(text) for text in test], classes, options.window)
    with torch.no_grad():
        samples = roles.test()
        loss = token_loss(model(input_ids=samples.inputs[:200]).logits, samples.labels[:200])
    cohort = min(options.cohort, roles.clients // 3)
    sticky, uniform = Sticky(cohort, 2 * cohort, max(1, cohort * 4 // 5), weights="proportional"), Uniform(cohort)
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()} if options.runs > 2 else {}
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {roles.clients} clients", file=sys.stderr)
    adapted = with_adapters(model, options.rank)
    runs = [federate("lean, adapters", adapted, roles, Lean(), sticky, options.lr, options)]
    if options.runs > 1:
        runs.append(federate("FedAvg, adapters, float32", adapted, roles, FedAvg(), uniform, options.lr, options))
    if options.runs > 2:
        plain, _, _ = language_model(options, alphabet)
        plain.load_state_dict(full)
        runs.append(federate("lean, full fine-tuning", plain, roles, Lean(), sticky, options.lr / 5, options))
    table(runs if len(runs) > 1 else runs * 2, math.exp(loss))


if __name__ == "__main__":
    main()
