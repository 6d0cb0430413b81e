"""Lean in one file of numpy: slow, naive, and meant to be read from top to bottom.

    python examples/lean_in_one_file.py

A tutorial, and the oracle of gluefl's tests: fed the same client updates, the real thing must send the same bytes and
publish the same bits. Statistics of normalisation layers, which lie on grids of their own, are left out.
`docs/lean.md` explains the parameters, `docs/wire-format.md` the bytes.
"""

from types import SimpleNamespace

import numpy as np

F = np.float32  # everything is float32, operation by operation, as in the real thing

# --- grids of powers of two ----------------------------------------------------------------------------------------


def power_of_two(numbers):
    """The nearest power of two on a logarithmic scale; 0 for 0."""
    mantissas, exponents = np.frexp(np.asarray(numbers, F))
    powers = np.ldexp(F(1), np.clip(exponents - (mantissas < F(0.5**0.5)), -126, 127))
    return np.where(np.asarray(numbers) > 0, powers, F(0)).astype(F)


# --- uploads: a random rotation, then one bit per coordinate ---------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10: 128 random bits that are the same in every language."""
    (a, b, c, d), (k, m), word = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & word, (p >> 32) ^ d ^ m, p & word
        k, m = (k + 0x9E3779B9) & word, (m + 0xBB67AE85) & word
    return a | b << 32 | c << 64 | d << 96


def signs(seed, round, client, block, size):
    """The random signs of one block for both stages of its rotation. Server and client derive them from the task."""
    calls = -(-size // 128)
    drawn = [philox((call, block, client, round), (seed & 0xFFFFFFFF, seed >> 32)) for call in range(2 * calls)]
    bits = np.frombuffer(b"".join(number.to_bytes(16, "little") for number in drawn), np.uint8)
    minus = np.unpackbits(bits, bitorder="little").reshape(2, -1)[:, :size]
    return F(1) - 2 * minus.astype(F)


def hadamard(x):
    """Sylvester's matrix times a vector, by additions alone."""
    for h in 2 ** np.arange(len(x).bit_length() - 1):
        pairs = x.reshape(-1, 2, h)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
    return x


def rotate(x, s):
    """y = H·D₂·H·D₁·x: every entry of y is a mixture of all entries of x, about normally distributed."""
    return hadamard(hadamard(x * s[0]) / F(len(x)) * s[1])


def rotate_back(y, s):
    """The inverse of `rotate`."""
    return hadamard(hadamard(y) / F(len(y)) * s[1]) * s[0]


def blocks_of(d, block):
    """How many blocks, and of what length: a short vector is one short block."""
    size = min(block, max(64, 1 << (d - 1).bit_length()))
    return -(-d // size), size


def compress(delta, seed, round, client, block):
    """An upload: a scale per block, then a bit for the sign of every rotated entry (DRIVE)."""
    count, size = blocks_of(len(delta), block)
    padded = np.concatenate([delta, np.zeros(count * size - len(delta), F)]).reshape(count, size)
    scales, bits = [], []
    for b in range(count):
        y = rotate(padded[b], signs(seed, round, client, b, size))
        norm, product = np.sqrt(np.sum(y.astype(float) ** 2)), np.sum(np.abs(y), dtype=float)
        scales.append(norm * norm / product if product else 0)  # so that the estimate is as long along delta as delta
        bits.append(y >= 0)
    return np.array(scales, "<f4").tobytes() + np.packbits(np.array(bits), bitorder="little").tobytes()


def decompress(data, d, weight, seed, round, client, block):
    """The server's estimate of an update, times its weight."""
    count, size = blocks_of(d, block)
    scales = np.frombuffer(data, "<f4", count) * F(weight)
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=4 * count), bitorder="little").reshape(count, size)
    levels = (2 * bits.astype(F) - 1) * scales[:, None]
    parts = [rotate_back(levels[b], signs(seed, round, client, b, size)) for b in range(count)]
    return np.concatenate(parts)[:d]


# --- packages: positions as gaps, cells as small integers, both in Rice codes --------------------------------------


def bits_of(numbers, k):
    """The length of Rice codes with parameter k: quotients in unary, remainders of k bits."""
    return sum(u >> k for u in numbers) + len(numbers) * (k + 1)


def rice_parameter(numbers, largest):
    """The parameter of the shortest codes. One of three (Kiely, 2004), the least of equally good ones."""
    twice_mean = 2 * (sum(numbers) + len(numbers)) // len(numbers)
    least = sum(twice_mean >= 3 << k for k in range(1, largest + 1))
    return min(range(least, min(least + 2, largest) + 1), key=lambda k: bits_of(numbers, k))


def signed_codes(cells):
    """Codes of cells in the order 0, −1, 1, −2, … or −1, 1, 0, −2, …, the shorter one; their parameter; which order."""
    codes = [2 * cell if cell >= 0 else -2 * cell - 1 for cell in cells]
    other = [(2, 0, 1)[code] if code < 3 else code for code in codes]
    best = (codes, rice_parameter(codes, 30), 0)
    for k in (0, 1):
        if bits_of(other, k) < bits_of(best[0], best[1]):
            best = (other, k, 1)
    return best


def varint(number):
    """Seven bits a byte, the lowest first."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def lowest_exponent(numbers):
    """The exponent of the largest power of two that divides all of them."""
    fractions = [float(number).as_integer_ratio() for number in numbers if number != 0]
    return min(((top & -top).bit_length() - bottom.bit_length() for top, bottom in fractions), default=0)


def package(tensors, missing, values, origin):
    """The bytes with which a client that knows version 0 comes to these values where it misses them."""
    present, head, all_gaps, all_cells, start = [], b"", [], [], 0
    for size in tensors:
        at = np.flatnonzero(missing[start : start + size])
        present.append(len(at) > 0)
        if len(at):
            gaps = (np.diff(at, prepend=-1) - 1).tolist()
            moved = (values[start + at] - origin[start + at]).astype(float)
            exponent = lowest_exponent(moved)
            codes, cell_k, reordered = signed_codes([round(cell) for cell in np.ldexp(moved, -exponent).tolist()])
            gap_k = rice_parameter(gaps, 15)
            head += varint(len(at) if len(at) < size else 0)
            head += bytes([exponent & 255, gap_k << 4 | reordered << 3 | min(cell_k, 7)] + [cell_k] * (cell_k >= 7))
            all_gaps += [(gap, gap_k) for gap in gaps if len(at) < size]  # none where the whole tensor is sent
            all_cells += [(code, cell_k) for code in codes]
        start += size
    remainders = [u >> place & 1 for u, k in all_gaps + all_cells for place in range(k)]
    quotients = [bit for u, k in all_gaps + all_cells for bit in [0] * (u >> k) + [1]]
    body = np.packbits(np.array(remainders + quotients, np.uint8), bitorder="little").tobytes()
    return np.packbits(present, bitorder="little").tobytes() + head + body


# --- the server ------------------------------------------------------------------------------------------------------


DEFAULTS = {
    "step": 0.5,  # a tensor's first step, in standard deviations of its initial weights
    "movement": 6.0,  # rms of a first update that a first step has at least; the model's mean limits the factor
    "coarsest": 2.0,  # and never above this, in the unit of `step`
    "step_of_first_update": 8.0,  # of a tensor without spread: its first step, in rms of its first update
    "origin_cells": 4,  # version 0 lies on a grid this many times finer than the first step
    "hysteresis": 0.55,  # in steps: above ½ noise changes less
    "refine_below": 0.0001,  # halve a tensor's step when a smaller share of it changes in a round
    "coarsen_above": 0.05,  # double it when a larger share changes, of it and of all weights
    "upload_block": 4096,
}


class Lean:
    """The latent vector moves in full precision; the published one follows in steps of a grid."""

    def __init__(self, tensors, initial, seed, **parameters):
        p = self.p = SimpleNamespace(**{**DEFAULTS, **parameters})
        self.tensors, self.d, self.seed, self.holds = tensors, len(initial), seed, {}  # client → version
        spreads = np.array([np.std(part.astype(float)) for part in self.split(initial)], F)
        largest = np.array([np.abs(part).max() for part in self.split(initial)], F)
        self.finest = 2 * power_of_two(largest / 2**20)
        self.coarsest = power_of_two(spreads * F(p.coarsest))
        steps = power_of_two(spreads * F(p.step))
        steps = np.where(steps > 0, np.maximum(steps, self.finest), F(0))
        fine = np.where(steps > 0, steps, power_of_two(largest) / 256) / F(p.origin_cells)
        fine = self.spread(np.where(fine == 0, F(1), fine))
        self.origin = np.rint(initial / fine) * fine + F(0)  # version 0, on a finer grid; every client knows it
        self.latent, self.published = initial.astype(F), self.origin.copy()
        self.steps = np.where(steps > 0, steps, F(np.inf))  # Δ; a tensor without spread has none yet
        self.slack = np.full(len(tensors), F(p.hysteresis))  # in steps: how far latent and published may be apart
        self.shares = np.full(len(tensors), F((p.refine_below * p.coarsen_above) ** 0.5))  # changed per round, smoothed
        self.version, self.average = 0, self.published
        self.same = [{0} for _ in range(self.d)]  # versions that had the present value of a coordinate
        self.before, self.same_before = self.published.copy(), [set() for _ in range(self.d)]  # and its value before

    def split(self, vector):
        return np.split(vector, np.cumsum(self.tensors)[:-1])

    def spread(self, numbers):
        return np.repeat(numbers, self.tensors)

    def play(self, cohort, delta_of):
        """One round with [(client, weight)]; `delta_of(client, weights)` is local training. Returns the messages."""
        task = self.seed, self.version + 1
        packages = {client: self.package(self.holds.get(client, 0)) for client, _ in cohort}
        uploads, total = {}, np.zeros(self.d, F)
        for client, weight in sorted(cohort):
            delta = delta_of(client, self.published).astype(F)  # a client trains from what is published
            uploads[client] = compress(delta, *task, client, self.p.upload_block)
            total += decompress(uploads[client], self.d, weight, *task, client, self.p.upload_block)
            self.holds[client] = self.version
        self.aggregate(total)
        return packages, uploads

    def package(self, held):
        """What a client that holds a version is sent. What came back to the value it holds is not missing."""
        since_0 = self.published != self.origin
        missing = since_0 if held == 0 else np.array([held not in versions for versions in self.same])
        return package(self.tensors, missing, self.published, self.origin)

    def aggregate(self, total):
        """Move the latent vector, publish the coordinates that are too far from it, control the rate."""
        self.latent = self.latent + total
        moves = np.sqrt([F((part**2).mean(dtype=float)) for part in self.split(total)])
        self.first_steps(moves)
        widths, old = self.spread(self.steps), self.published
        with np.errstate(invalid="ignore"):  # an infinite step: nothing is published
            target = self.origin + np.rint((self.latent - self.origin) / widths) * widths
            distance = np.abs(self.latent - old) / widths
        changes = (distance > self.spread(self.slack)) & (target != old)
        self.published = np.where(changes, target, old)
        self.version += 1
        self.remember(old)
        self.control(np.array([part.mean() for part in self.split(changes)], F), moves)
        share = 1 - min(0.9, (1 + self.version) / (10 + self.version))  # the average is what is evaluated
        self.average = self.average + F(share) * (self.published - self.average)

    def first_steps(self, moves):
        """Tensors that move fast become coarser, by the model's mean factor at most. Those without spread start."""
        lacks = self.steps == np.inf
        if self.version == 0:
            coarser, sizes = F(self.p.movement) * moves / self.steps, np.where(lacks, 0, self.tensors)
            mean = F((coarser.astype(float) * sizes).sum() / max(1, sizes.sum()))
            coarse = np.where(lacks, F(0), self.steps) * power_of_two(np.minimum(coarser, mean))
            self.steps = np.maximum(self.steps, np.minimum(coarse, self.coarsest))
        first = power_of_two(F(self.p.step_of_first_update) * moves)
        starts, first = lacks & (first > 0), np.maximum(first, self.finest)
        self.finest = np.where(starts, np.maximum(self.finest, first / 4096), self.finest)
        self.steps = np.where(starts, first, self.steps)

    def control(self, changed, moves):
        """Halve a step when hardly anything of a tensor changes, double it when much of the model does. Without spread
        it becomes at most as coarse as it would begin today."""
        p, h, has_step = self.p, F(self.p.hysteresis), self.steps < np.inf
        self.shares = np.where(has_step, F(0.9) * self.shares + F(1 - 0.9) * changed, self.shares)
        settled = self.slack <= h
        finer = settled & (self.shares < F(p.refine_below)) & (self.steps / 2 >= self.finest)
        much = (self.shares * self.tensors).sum() / self.d > p.coarsen_above
        coarsest = np.where(self.coarsest > 0, self.coarsest, power_of_two(F(p.step_of_first_update) * moves))
        coarser = settled & much & (self.shares > F(p.coarsen_above)) & (self.steps * 2 <= coarsest)
        factor = np.where(finer, F(0.5), np.where(coarser, F(2), F(1)))
        self.steps, self.shares = self.steps * factor, self.shares / factor
        # What a finer grid changes is published over 20 rounds: the slack starts at 2h and falls to h.
        self.slack = np.where(finer, 2 * h, np.maximum(self.slack - F(p.hysteresis / 20), h))

    def remember(self, old):
        """The versions in which a coordinate had its present value; only the value before it is remembered, too."""
        for j in range(self.d):
            if self.published[j] != old[j]:
                back = self.published[j] == self.before[j]
                self.same[j], self.same_before[j] = self.same_before[j] if back else set(), self.same[j]
                self.before[j] = old[j]
            self.same[j].add(self.version)


# --- a small federation to watch -------------------------------------------------------------------------------------


def sticky_cohorts(rng, N, K, S, C):
    """C clients from a sticky group of S, K−C from outside it, who then replace members that sat idle; weights 1/K."""
    group = set(rng.choice(N, S, replace=False).tolist())
    while True:
        chosen = rng.choice(sorted(group), C, replace=False).tolist()
        new = rng.choice([i for i in range(N) if i not in group], K - C, replace=False).tolist()
        gone = rng.choice(sorted(group - set(chosen)), len(new), replace=False).tolist()
        group = (group | set(new)) - set(gone)
        yield [(i, 1 / K) for i in chosen + new]


def main():
    """Linear regression by 400 clients, 10 a round: how many bytes are an upload and a download?"""
    N, K, S, C, d, rounds = 400, 10, 80, 9, 512, 60
    rng = np.random.default_rng(1)
    truth = rng.normal(size=d) * (rng.random(d) < 0.3) * 3
    features = rng.normal(size=(N, 30, d)).astype(F)
    answers = (features @ truth + rng.normal(size=(N, 30)) * 0.5).astype(F)

    def local_training(i, weights):
        w = weights.copy()
        for _ in range(10):
            w -= F(0.003) * features[i].T @ (features[i] @ w - answers[i]) / 30
        return w - weights

    lean, cohorts = Lean([d], rng.normal(size=d).astype(F) * F(0.1), seed=7), sticky_cohorts(rng, N, K, S, C)
    print(f"FedAvg: {4 * d} bytes in each direction\nround  bytes down  bytes up  error of the average")
    for round in range(1, rounds + 1):
        packages, uploads = lean.play(next(cohorts), local_training)
        if round % 10 == 0:
            down, up = (np.mean([len(data) for data in messages.values()]) for messages in (packages, uploads))
            error = np.linalg.norm(lean.average - truth) / np.linalg.norm(truth)
            print(f"{round:5d}  {down:10.0f}  {up:8.0f}  {error:20.3f}")


if __name__ == "__main__":
    main()
