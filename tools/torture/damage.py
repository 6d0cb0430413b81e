"""Damaged files: a run goes on to the same result or says that it cannot; `gluefl verify` sees what matters.

`python tools/torture damage [--count 500]`
"""

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import STRATEGIES, Case, Ended, Process, cases
from progress import Progress

ROUNDS, EVERY = 9, 2


def flip(path: Path, rng: random.Random) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    if data:
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """The end is lost."""
    os.truncate(path, rng.randrange(max(path.stat().st_size, 1)))


def delete(path: Path, rng: random.Random) -> None:
    """The file is lost."""
    path.unlink()


def zero(path: Path, rng: random.Random) -> None:
    """A sector holds zeros."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(len(data), 1)) // 512 * 512
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def append(path: Path, rng: random.Random) -> None:
    """Rubbish follows the end."""
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 50)))


def exchange(path: Path, rng: random.Random) -> None:
    """The file is another one of the same run."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if others:
        path.write_bytes(rng.choice(sorted(others)).read_bytes())


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip,
    flip,
    flip,
    truncate,
    delete,
    zero,
    append,
    exchange,
)


def stopped(case: Case, out: Path) -> Path:
    """A run that was killed when it had written the second checkpoint before its last."""

    def setup() -> None:
        from gluefl.simulation.folder import RunFolder

        save = RunFolder.save

        def killed(self: RunFolder, state: Any) -> None:
            save(self, state)
            if state.round >= ROUNDS - 3:
                os._exit(9)

        RunFolder.save = killed  # type: ignore[method-assign]

    ended = case.start(out, resume=False, setup=setup).end()
    if ended.status != 9:
        raise RuntimeError(f"the run to be damaged ended with {ended.status}: {ended.text}")
    return out


def kind_of(path: Path) -> str:
    """The kind of a file of a run: its name without the number of a round."""
    return "state" + path.suffix if path.name.startswith("state-") else path.name


def judge(case: Case, folder: Path, resumed: Ended, verified: Ended) -> str:
    """What became of a damaged run: same, refused, or something wrong."""
    if resumed.status == 0:
        result = "same result" if case.is_right(folder) else "wrong: another result with exit 0"
    else:
        result = "refused" if resumed.refused else f"wrong: exit {resumed.status}: {resumed.text[-600:]}"
    if verified.status not in (0, 1) or (verified.status and "Traceback" in verified.text):
        return f"wrong: verify ended with {verified.status}: {verified.text[-600:]}"
    if verified.status == 0 and result == "refused":
        return f"wrong: verify saw nothing, the run was refused: {resumed.text[-600:]}"
    return result


def run(work: Path, damages: int, seed: int) -> dict[str, Any]:
    """Every file of killed and of finished runs in turn, every kind of damage."""
    rng, counts, kinds = random.Random(seed), Counter[str](), Counter[str]()  # noqa: S311 - places
    all_cases = cases(work, ROUNDS, EVERY, STRATEGIES[:damages])
    folders = [(case, stopped(case, work / f"{case.strategy}-killed")) for case in all_cases]
    folders += [(case, work / f"{case.strategy}-undisturbed") for case in all_cases]
    targets = [
        (case, whole, path.relative_to(whole))
        for case, whole in folders
        for path in sorted(whole.rglob("*"))
        if path.is_file()
    ]
    rng.shuffle(targets)
    said = Progress("damage", damages)
    for number in range(damages):
        case, whole, name = targets[number % len(targets)]
        folder = Path(shutil.copytree(whole, work / "damaged"))
        damage = rng.choice(DAMAGES)
        before = (folder / name).read_bytes()
        damage(folder / name, rng)
        if (folder / name).exists() and (folder / name).read_bytes() == before:
            append(folder / name, rng)
        verified = Process(["verify", folder], work / "verify.log").end()
        result = judge(case, folder, case.start(folder).end(), verified)
        if result.startswith("wrong"):
            result = f"wrong: {damage.__name__} of {whole.name}/{name}: {result}"
            shutil.copytree(folder, work / f"wrong-{number}")
        counts[result] += 1
        counts["damage that verify missed, harmless"] += verified.status == 0 and result == "same result"
        kinds[kind_of(name)] += 1
        if verified.status == 0:
            kinds[f"missed in {kind_of(name)}"] += 1
        shutil.rmtree(folder)
        said.at(number + 1)
    wrong = [result for result in counts if result.startswith("wrong")]
    kept = {name: count for name, count in counts.items() if name not in wrong}
    return {"damages": damages, **kept, "files": dict(sorted(kinds.items())), "wrong": wrong}
