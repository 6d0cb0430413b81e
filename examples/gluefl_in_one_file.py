"""GlueFL and its baselines in one file of numpy: slow, naive, and meant to be read from top to bottom.

    python examples/gluefl_in_one_file.py

A tutorial, and the oracle of gluefl's tests: fed the same client updates, the real thing must choose the same
positions and end with the same bits. Symbols in comments are those of the paper (He et al., MLSys 2023).
"""

import numpy as np

F = np.float32  # everything is float32, operation by operation, as in the real thing

# --- top-q ------------------------------------------------------------------------------------------------------


def tie(j, round):
    """Who goes first among equal magnitudes: a fixed hash of position and round that both sides know."""
    x = int(j) ^ (round * 0x9E3779B9 & 0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x ^= x >> 16
        x = x * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def top(values, k, round, among=None):
    """The positions of the k largest magnitudes, as a mask."""
    allowed = range(len(values)) if among is None else np.flatnonzero(among)
    best = sorted(allowed, key=lambda j: (-abs(float(values[j])), tie(j, round)))[: max(k, 0)]
    mask = np.zeros(len(values), bool)
    mask[best] = True
    return mask


def share(percent, d):
    """⌊q·d⌋ for a whole number of percent, without floating point."""
    return percent * d // 100


# --- the four strategies: a client's half, a server's half --------------------------------------------------------


class FedAvg:
    """Everything travels."""

    def __init__(self, d):
        self.d = d

    def mask(self, round):
        return np.ones(self.d, bool)  # what both sides know: values there travel without positions

    def client(self, i, delta, weight, round):
        return np.ones(self.d, bool), delta

    def server(self, total, round):
        return np.ones(self.d, bool)  # which positions of the sum become the update


class STC:
    """Algorithm 1: top-q on the clients, top-q on the server, and nothing known beforehand."""

    def __init__(self, d, q=20):
        self.d, self.q = d, q

    def mask(self, round):
        return np.zeros(self.d, bool)

    def client(self, i, delta, weight, round):
        return top(delta, share(self.q, self.d), round), delta

    def server(self, total, round):
        return top(total, share(self.q, self.d), round)


class GlueFL:
    """Algorithm 3: a shared mask M that shifts slowly, and a unique part beside it."""

    def __init__(self, d, q=20, q_shared=16, regenerate_every=10, compensation="rescaled"):
        self.d, self.q, self.q_shared, self.every = d, q, q_shared, regenerate_every
        self.compensation = compensation
        self.shared = np.zeros(d, bool)  # M^t
        self.memory = {}  # client → h (or ν·h), what it did not send

    def mask(self, round):
        fresh = round == 1 or (self.every is not None and (round - 1) % self.every == 0)
        return np.zeros(self.d, bool) if fresh else self.shared  # empty when the mask is regenerated

    def unique(self, values, round):
        """top_{q − q_shr}(¬M ⊙ Δ); the whole of q when M is empty."""
        mask = self.mask(round)
        return top(values, share(self.q, self.d) - int(mask.sum()), round, among=~mask)

    def client(self, i, delta, weight, round):
        if i in self.memory and self.compensation == "rescaled":
            delta = delta + self.memory[i] / F(weight)  # equation 7: ν^φ/ν · h, stored as ν·h
        elif i in self.memory and self.compensation == "plain":
            delta = delta + self.memory[i]
        sent = self.mask(round) | self.unique(delta, round)
        if self.compensation != "none":
            left = delta * F(weight) if self.compensation == "rescaled" else delta
            self.memory[i] = np.where(sent, F(0), left)
        return sent, delta

    def server(self, total, round):
        changed = self.mask(round) | self.unique(total, round)
        most = max(1, share(self.q, self.d)) - 1  # of a small model: one position is never shared
        self.shared = top(total, min(share(self.q_shared, self.d), most), round, among=changed)  # M^{t+1}
        return changed


class APF:
    """Stable parameters are frozen for a while: neither trained, nor sent, nor changed."""

    def __init__(self, d, threshold=0.1, check_every=5, decay=0.99):
        self.d, self.threshold, self.every, self.decay = d, threshold, check_every, decay
        self.sum, self.average, self.magnitude = np.zeros((3, d), F)
        self.period, self.frozen_until = np.zeros((2, d), int)

    def mask(self, round):
        return self.frozen_until < round

    def client(self, i, delta, weight, round):
        return self.mask(round), delta

    def server(self, total, round):
        active = self.mask(round)
        self.sum[active] += total[active]
        if round % self.every == 0:
            for j in np.flatnonzero(active):
                old, new = F(self.decay), F(1 - self.decay)
                self.average[j] = old * self.average[j] + new * self.sum[j]
                self.magnitude[j] = old * self.magnitude[j] + new * abs(self.sum[j])
                stable = abs(self.average[j]) < F(self.threshold) * self.magnitude[j] or self.magnitude[j] == 0
                if stable:
                    self.period[j] += self.every
                    self.frozen_until[j] = round + self.period[j]
                else:
                    self.period[j] //= 2
            self.sum[:] = 0
        return active


# --- who takes part ----------------------------------------------------------------------------------------------


def uniform(rng, N, K):
    """K of N; ν = N/K · p with p = 1/N."""
    return [(int(i), 1 / K) for i in rng.choice(N, K, replace=False)]


class Sticky:
    """Algorithm 2: C from the sticky group, K−C from outside; newcomers replace members that sat idle."""

    def __init__(self, rng, N, K, S, C):
        self.N, self.K, self.C = N, K, C
        self.group = set(rng.choice(N, S, replace=False).tolist())

    def cohort(self, rng):
        S, inside = len(self.group), sorted(self.group)
        outside = [i for i in range(self.N) if i not in self.group]
        chosen = rng.choice(inside, self.C, replace=False).tolist()
        new = rng.choice(outside, self.K - self.C, replace=False).tolist()
        idle = [i for i in inside if i not in chosen]
        gone = rng.choice(idle, len(new), replace=False).tolist()
        self.group = (self.group | set(new)) - set(gone)
        sticky_weight, other_weight = S / self.C / self.N, (self.N - S) / (self.K - self.C) / self.N
        return [(i, sticky_weight) for i in chosen] + [(i, other_weight) for i in new]


# --- one round ---------------------------------------------------------------------------------------------------


class Server:
    """The model, the round in which each coordinate last changed, and the version each client holds."""

    def __init__(self, weights, strategy):
        self.weights, self.strategy, self.round = weights.astype(F), strategy, 0
        self.changed_at = np.zeros(len(weights), int)
        self.holds = {}  # client → version; a client that was never here needs the whole model
        self.update_positions = None

    def play(self, cohort, delta_of):
        """One round with [(client, weight)]; `delta_of(client, weights, frozen)` is local training."""
        self.round += 1
        downloaded = {
            i: self.changed_at > self.holds[i] if i in self.holds else np.ones(len(self.weights), bool)
            for i, _ in cohort
        }
        frozen = ~self.strategy.mask(self.round) if isinstance(self.strategy, APF) else None
        total = np.zeros(len(self.weights), F)
        for i, weight in sorted(cohort):
            delta = delta_of(i, self.weights, frozen).astype(F)
            sent, values = self.strategy.client(i, delta, weight, self.round)
            total[sent] += values[sent] * F(weight)  # Σ ν_i Δ_i, in the order of the clients
        changed = self.strategy.server(total, self.round)
        for i, _ in cohort:
            self.holds[i] = self.round - 1  # what it downloaded is the model before this update
        self.weights[changed] += total[changed]
        self.changed_at[changed] = self.round
        self.update_positions = changed
        return {i: float(mask.mean()) for i, mask in downloaded.items()}


# --- a small federation to watch -----------------------------------------------------------------------------------


def main():
    """Linear regression by 400 clients, 10 a round: what share of the model does a client download?"""
    N, K, S, C, d, rounds = 400, 10, 40, 8, 300, 60
    rng = np.random.default_rng(1)
    truth = rng.normal(size=d) * (rng.random(d) < 0.3) * 3
    features = rng.normal(size=(N, 30, d)).astype(F)
    answers = (features @ truth + rng.normal(size=(N, 30)) * 0.5).astype(F)

    def local_training(i, weights, frozen):
        w = weights.copy()
        for _ in range(10):
            gradient = features[i].T @ (features[i] @ w - answers[i]) / 30
            w -= F(0.003) * (gradient if frozen is None else np.where(frozen, 0, gradient))
        return w - weights

    print("strategy  model downloaded per client and round   error of the model")
    for strategy in (FedAvg(d), STC(d), APF(d), GlueFL(d)):
        rng = np.random.default_rng(2)
        sticky = Sticky(rng, N, K, S, C)
        server, shares = Server(np.zeros(d), strategy), []
        for _ in range(rounds):
            cohort = sticky.cohort(rng) if isinstance(strategy, GlueFL) else uniform(rng, N, K)
            shares += server.play(cohort, local_training).values()
        error = np.linalg.norm(server.weights - truth) / np.linalg.norm(truth)
        print(f"{type(strategy).__name__:8s}  {np.mean(shares):38.1%}   {error:18.3f}")


if __name__ == "__main__":
    main()
