"""Every loader on a small tree of files in the true format, written here; broken input; the cache; the laws
of partitioning; and the real data where they lie beside the repository or under GLUEFL_DATA."""

import csv
import gzip
import io
import json
import os
import struct
import tracemalloc
import warnings
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gluefl import files as files_module
from gluefl.errors import DataError, UsageError
from gluefl.populations import LOADERS, Population, Samples, build, cache, partition
from gluefl.populations.grouped import enough
from gluefl.populations.moments import moments
from gluefl.populations.speech import RATE, WORDS, logmel
from gluefl.randomness import stream

REAL = Path(os.environ.get("GLUEFL_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUEFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GLUEFL_DATA", raising=False)


@pytest.fixture
def rng():
    return stream(0, "tests")


def real(path: str) -> str:
    if not (REAL / path).exists():
        pytest.skip(f"no {path}")
    return str(REAL / path)


def check(population: Population) -> None:
    """What every population promises."""
    for client in {0, population.clients - 1}:
        mine = population.train(client)
        assert isinstance(mine, Samples)
        assert len(mine) == population.size(client) == len(mine.inputs) > 0
        assert mine.labels.dtype == torch.int64
        assert mine.labels.min() >= 0 and mine.labels.max() < population.classes
        model_inputs = population.transform(mine.inputs)
        assert model_inputs.shape == (len(mine), *population.shape)
        assert model_inputs.dtype == torch.float32 or model_inputs.dtype == torch.int64
        assert model_inputs.isfinite().all()
        stacked = population.transform(mine.inputs[None])
        assert torch.equal(stacked[0], model_inputs)
        again = population.train(client)
        assert torch.equal(again.inputs, mine.inputs) and torch.equal(again.labels, mine.labels)
    assert len(population.test()) > 0


# femnist


def write_leaf(root: Path, rng, part: str = "train", users=("f01", "f00"), samples: int = 30) -> Path:
    data = {
        user: {
            "x": rng.random((samples, 784)).round(3).tolist(),
            "y": rng.integers(0, 62, samples).tolist(),
        }
        for user in users
    }
    content = {"users": list(users), "num_samples": [samples] * len(users), "user_data": data}
    (root / part).mkdir(parents=True, exist_ok=True)
    file = root / part / f"{part}_0.json"
    file.write_text(json.dumps(content))
    return file


def png(rng, shape=(28, 28)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(buffer, "png")
    return buffer.getvalue()


def test_femnist_leaf(tmp_path, rng):
    file = write_leaf(tmp_path, rng)
    write_leaf(tmp_path, rng, "test", samples=5)
    (tmp_path / "train" / "more.json").write_text(json.dumps({"users": [], "num_samples": [], "user_data": {}}))
    seen = []
    population = build("femnist", path=tmp_path, progress=lambda done, total: seen.append((done, total)))
    check(population)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (population.clients, population.classes, population.shape) == (2, 62, (1, 28, 28))
    assert population.names == ("f00", "f01") and len(population.test()) == 10
    written = json.loads(file.read_text())["user_data"]["f00"]
    mine = population.train(0)
    assert mine.labels.tolist() == written["y"]
    assert np.abs(mine.inputs.numpy().reshape(30, 784) / 255 - written["x"]).max() <= 0.5 / 255 + 1e-9
    assert build("femnist", path=tmp_path, channels=3).shape == (3, 28, 28)


def test_femnist_leaves_out_small_writers_and_holds_out_samples(tmp_path, rng):
    write_leaf(tmp_path, rng, "all_data", users=("a", "b", "c"), samples=22)
    content = json.loads((tmp_path / "all_data" / "all_data_0.json").read_text())
    content["user_data"]["b"] = {key: value[:21] for key, value in content["user_data"]["b"].items()}
    (tmp_path / "all_data" / "all_data_0.json").write_text(json.dumps(content))
    population = build("femnist", path=tmp_path)
    assert population.names == ("a", "c")  # 22 before holding out is enough
    assert [population.size(client) for client in range(2)] == [20, 20] and len(population.test()) == 4
    assert build("femnist", path=tmp_path, min_samples=21).clients == 3
    with pytest.raises(UsageError, match="clients = 3, but there are 2"):
        build("femnist", path=tmp_path, clients=3)
    with pytest.raises(DataError, match="no clients"):
        build("femnist", path=tmp_path, min_samples=100)
    with pytest.raises(DataError, match="no test set of its own"):
        build("femnist", path=tmp_path, held_out="official")


def write_parquet(file: Path, images: list, writers: list[str], labels: list[int]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": image, "path": None} for image in images]
    table = pyarrow.table({"image": rows, "writer_id": writers, "hsf_id": [0] * len(rows), "character": labels})
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file)


def test_femnist_parquet(tmp_path, rng):
    writers = ["f0000_14"] * 25 + ["f0001_41"] * 30 + ["small"] * 3
    images = [png(rng) for _ in writers]
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", images, writers, list(range(58)))
    population = build("femnist", path=tmp_path)
    check(population)
    assert population.names == ("f0000_14", "f0001_41")
    labels = torch.cat([population.train(0).labels, population.train(1).labels, population.test().labels])
    assert sorted(labels.tolist()) == list(range(55))


def test_femnist_broken(tmp_path, rng):
    file = write_leaf(tmp_path, rng)
    good = json.loads(file.read_text())

    def broken(change, reason: str, count: int = 1) -> None:
        content = json.loads(json.dumps(good))
        change(content["user_data"]["f00"])
        file.write_text(json.dumps(content))
        with pytest.raises(DataError, match=reason) as error:
            build("femnist", path=tmp_path)
        assert str(file) in str(error.value) and "f00" in str(error.value)
        assert build("femnist", path=tmp_path, skip_broken=True).skipped == count

    broken(lambda user: user["y"].__setitem__(3, 62), "label 62 is outside")
    broken(lambda user: user["y"].pop(), "not 29 images")
    broken(lambda user: user["x"][0].pop(), "not arrays of numbers")
    broken(lambda user: user["x"][0].__setitem__(0, 1.5), "numbers in 0…1")
    broken(lambda user: user.update(x=[], y=[]), "no samples")
    for y in (3, [[1], [2]], [10**30]):
        broken(lambda user, y=y: user.update(y=y), "not arrays of numbers")
    (tmp_path / "train" / "cut.json").write_text(file.read_text()[:1000])
    file.write_text(json.dumps(good))
    with pytest.raises(DataError, match=r"cut\.json: not a LEAF JSON file"):
        build("femnist", path=tmp_path)
    assert build("femnist", path=tmp_path, skip_broken=True).skipped == 1
    (tmp_path / "train" / "cut.json").write_text("[" * 200_000)
    assert build("femnist", path=tmp_path, skip_broken=True).skipped == 1


def test_femnist_parquet_broken(tmp_path, rng):
    images = [png(rng) for _ in range(30)]
    images[7], images[8] = b"no image", png(rng, (27, 28))
    file = tmp_path / "a.parquet"
    write_parquet(file, images, ["w"] * 30, [0] * 29 + [99])
    with pytest.raises(DataError, match=r"a\.parquet, writer w: an image or its label does not decode"):
        build("femnist", path=tmp_path)
    assert build("femnist", path=tmp_path, skip_broken=True).skipped == 3
    write_parquet(file, [png(rng) for _ in range(30)], ["w"] * 30, [*"0" * 28, "A", "9" * 30])
    with pytest.raises(DataError, match=r"a\.parquet, writer w: an image or its label does not decode.*'A'"):
        build("femnist", path=tmp_path)
    assert build("femnist", path=tmp_path, skip_broken=True).skipped == 2
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DataError, match=r"a\.parquet: not a parquet file"):
        build("femnist", path=tmp_path)


# speech


def write_wav(file: Path, samples: np.ndarray, rate: int = RATE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture
def speech(tmp_path, rng):
    root = tmp_path / "speech"
    for speaker in ("00f0204f", "0132a06d", "ffd2ba2f"):
        for number in range(4):
            for word in ("cat", "zero"):
                noise = rng.normal(0, 3000, rng.integers(8000, 20000))
                write_wav(root / word / f"{speaker}_nohash_{number}.wav", noise)
    write_wav(root / "_background_noise_" / "pink_noise.wav", np.zeros(20000))
    listed = [f"{word}/ffd2ba2f_nohash_{number}.wav" for word in ("cat", "zero") for number in range(4)]
    (root / "testing_list.txt").write_text("\n".join(listed) + "\n")
    (root / "validation_list.txt").write_text("")
    return root


def test_speech(speech):
    seen = []
    population = build("speech", path=speech, min_samples=8, progress=lambda *at: seen.append(at))
    check(population)
    assert seen == [(24, 24)]
    assert (population.clients, population.classes, population.shape) == (2, 35, (1, 32, 32))
    assert population.names == ("00f0204f", "0132a06d")
    assert len(population.test()) == 8
    assert sorted(population.train(0).labels.tolist()) == [WORDS.index("cat")] * 4 + [WORDS.index("zero")] * 4
    assert build("speech", path=speech, min_samples=8, held_out="samples", test_fraction=0.25).clients == 3
    assert build("speech", path=speech, min_samples=8, held_out="clients", test_fraction=0.34).clients == 2


def test_logmel_sees_pitch_and_loudness_does_not_matter():
    time = torch.arange(RATE) / RATE
    low, high = (torch.sin(2 * torch.pi * hertz * time) for hertz in (300.0, 3000.0))
    features = logmel(torch.stack([low, high, 0.01 * high, torch.zeros(RATE)]))
    assert features.shape == (4, 32, 32) and features.dtype == np.uint8
    loudest = features.astype(int).sum(axis=2).argmax(axis=1)
    assert 0 < loudest[0] < loudest[1] < 31
    assert features[1].max() == 255
    assert np.abs(features[1].astype(int) - features[2]).max() <= 1
    assert features[3].max() == 0


def test_speech_broken(speech, rng):
    def broken(name: str, reason: str) -> None:
        with pytest.raises(DataError, match=reason) as error:
            build("speech", path=speech, min_samples=1)
        assert name in str(error.value)
        assert build("speech", path=speech, min_samples=1, skip_broken=True).skipped == 1
        (speech / name).unlink()

    write_wav(speech / "cat" / "aa_nohash_0.wav", rng.normal(0, 99, 8000), rate=8000)
    broken("cat/aa_nohash_0.wav", "8000 Hz")
    (speech / "cat" / "aa_nohash_1.wav").write_bytes(b"RIFF nothing")
    broken("cat/aa_nohash_1.wav", "not a readable WAV")
    write_wav(speech / "cat" / "aa_nohash_2.wav", np.zeros(0))
    broken("cat/aa_nohash_2.wav", "no sound")
    write_wav(speech / "cat" / "nameless.wav", np.ones(8000))
    broken("cat/nameless.wav", "not named")
    (speech / "testing_list.txt").write_bytes(b"cat/\xff_nohash_0.wav")
    with pytest.raises(DataError, match=r"testing_list\.txt: not a readable text"):
        build("speech", path=speech)
    (speech / "testing_list.txt").unlink()
    with pytest.raises(DataError, match=r"testing_list\.txt is missing.*curl"):
        build("speech", path=speech)


def test_speech_unknown_word(speech):
    write_wav(speech / "banana" / "aa_nohash_0.wav", np.ones(8000))
    with pytest.raises(DataError, match="banana: is not one of the 35 words"):
        build("speech", path=speech)


# openimage


@pytest.fixture
def open_images(tmp_path, rng):
    image = pytest.importorskip("PIL.Image")
    root = tmp_path / "openimage"
    (root / "client_data_mapping").mkdir(parents=True)
    for part, clients in (("train", (10, 9, 2)), ("test", (5,))):
        (root / part).mkdir()
        with open(root / "client_data_mapping" / f"{part}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["client_id", "sample_path", "label_name", "label_id"])
            for client in clients:
                for number in range(client):
                    name = f"{client}_{number}.jpg"
                    pixels = rng.integers(0, 256, (40, 60, 3), np.uint8)
                    image.fromarray(pixels).save(root / part / name)
                    writer.writerow([client, name, "Tree", number])
    return root


def test_openimage(open_images):
    options = {"path": open_images, "image_size": 16, "min_samples": 3, "test_samples": 4}
    population = build("openimage", **options)
    check(population)
    assert (population.clients, population.classes, population.shape) == (2, 596, (3, 16, 16))
    assert population.names == ("9", "10")  # in the order of numbers
    assert population.train(1).inputs.dtype == torch.uint8
    assert population.train(1).labels.tolist() == list(range(10))
    assert len(population.test()) == 4 and population.test() is population.test()
    assert build("openimage", clients=1, **options).clients == 1
    with open(open_images / "client_data_mapping" / "train.csv", "a") as file:
        file.writelines(f"{10**30},10_{number}.jpg,Tree,0\n" for number in range(3))
    assert build("openimage", **options).names == ("10", str(10**30), "9")  # too long for numbers


def test_openimage_broken(open_images):
    options = {"path": open_images, "image_size": 16, "min_samples": 3}
    broken = open_images / "train" / "9_4.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(DataError, match=r"9_4\.jpg: does not decode"):
        build("openimage", **options).train(0)
    population = build("openimage", skip_broken=True, **options)
    mine = population.train(0)
    assert population.skipped == 1 and len(mine) == population.size(0) == 9
    assert torch.equal(mine.inputs[4], mine.inputs[3]) and mine.labels[4] == mine.labels[3]
    with pytest.raises(DataError, match=r"train\.csv, line .*: the label 9 is outside 0…8"):
        build("openimage", classes=9, **options)
    (open_images / "test" / "5_0.jpg").unlink()
    with pytest.raises(DataError, match=r"5_0\.jpg is missing"):
        build("openimage", **options)
    with open(open_images / "client_data_mapping" / "test.csv", "a") as file:
        file.write(f"1,{'x' * 140_000},Tree,0\n")
    with pytest.raises(DataError, match=r"test\.csv, line 7: not a readable CSV"):
        build("openimage", **options)
    (open_images / "client_data_mapping" / "test.csv").write_text("client,path\n")
    with pytest.raises(DataError, match=r"test\.csv: has the columns"):
        build("openimage", **options)


# mnist_writers


def idx(array: np.ndarray) -> bytes:
    code = {1: 8, 4: 12}[array.dtype.itemsize]
    big = array.astype(array.dtype.newbyteorder(">"))
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, code, array.ndim, *array.shape) + big.tobytes()


@pytest.fixture
def mnist(tmp_path, rng):
    root = tmp_path / "mnist"
    root.mkdir()
    for name, qname, samples, writers in (("train", "train", 300, (5, 6, 7)), ("t10k", "test", 100, (8, 9))):
        labels = rng.integers(0, 10, samples).astype(np.uint8)
        images = rng.integers(0, 256, (samples, 28, 28), np.uint8)
        extended = np.zeros((samples + (20 if qname == "test" else 0), 8), np.int32)
        extended[:samples, 0], extended[:, 2] = labels, np.resize(writers, len(extended))
        (root / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (root / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
        (root / f"qmnist-{qname}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(extended)))
    return root


def test_mnist_writers(mnist):
    population = build("mnist_writers", path=mnist)
    check(population)
    assert population.names == ("5", "6", "7", "8", "9") and population.size(0) == 90
    official = build("mnist_writers", path=mnist, held_out="official", channels=3)
    assert official.clients == 3 and official.size(0) == 100 and len(official.test()) == 100
    assert official.shape == (3, 28, 28)
    aside = build("mnist_writers", path=mnist, held_out="clients", test_fraction=0.2, seed=3)
    assert aside.clients == 4 and len(aside.test()) in (50, 100)
    same = build("mnist_writers", path=mnist, clients=2)
    assert torch.equal(same.train(1).inputs, population.train(1).inputs)


def test_mnist_writers_skew(mnist):
    plain, skewed = (build("mnist_writers", path=mnist, **more) for more in ({}, {"skew": 0.1}))
    for client in range(plain.clients):
        mine = plain.rows[plain.offsets[client] : plain.offsets[client + 1]]
        kept = skewed.rows[skewed.offsets[client] : skewed.offsets[client + 1]]
        assert set(kept) < set(mine) and len(kept) == int(np.ceil(0.4 * len(mine)))
    assert np.array_equal(plain.test_rows, skewed.test_rows)
    shares = [np.bincount(skewed.train(c).labels, minlength=10).max() / skewed.size(c) for c in range(5)]
    assert np.mean(shares) > 0.2  # a tenth without skew


def test_mnist_writers_broken(mnist):
    labels = mnist / "qmnist-train-labels-idx2-int.gz"
    columns = np.zeros((300, 8), np.int32)
    labels.write_bytes(gzip.compress(idx(columns)))
    with pytest.raises(DataError, match="not those of MNIST's train set"):
        build("mnist_writers", path=mnist)
    whole = labels.read_bytes()
    for wrong in (whole[:20], whole[:10] + b"\xff" * 30, gzip.compress(idx(np.array(3, np.int32)))):
        labels.write_bytes(wrong)
        with pytest.raises(DataError, match=r"qmnist-train.*not a whole IDX file"):
            build("mnist_writers", path=mnist)
    labels.unlink()
    with pytest.raises(DataError, match=r"qmnist-train.*is missing.*curl"):
        build("mnist_writers", path=mnist)


@pytest.mark.parametrize(("name", "shape"), [("x", ()), ("y", ()), ("y", (4, 1)), ("writer", ()), ("writer", (4, 1))])
def test_mnist_writers_of_other_shapes(tmp_path, name, shape):
    shapes = {"x": (4, 28, 28), "y": (4,), "writer": (4,)}
    arrays = {f"{key}_{part}": np.zeros(size, int) for key, size in shapes.items() for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **{**arrays, f"{name}_train": np.zeros(shape, int)})
    with pytest.raises(DataError, match="the train images, labels and writers do not fit together"):
        build("mnist_writers", path=tmp_path / "mnist.npz")


# spoken_digits, commands


@pytest.mark.parametrize("name", ["spoken_digits", "commands"])
def test_spoken(tmp_path, rng, name):
    file = tmp_path / "spoken.npz"
    arrays = {
        "x": rng.integers(0, 64, (90, 32, 32), np.uint8),
        "y": np.tile(np.arange(3, dtype=np.uint8), 30),
        "speaker": np.repeat(np.array([1, 2, 10], np.uint8), 30),
    }
    words = {"words": np.array(["a", "b", "c"])} if name == "commands" else {}
    np.savez(file, **arrays, **words)
    population = build(name, path=file)
    check(population)
    assert population.names == ("1", "2", "10") and population.shape == (1, 32, 32)
    assert population.classes == (3 if words else 10) and len(population.test()) == 9
    np.savez(file, **{**arrays, "y": arrays["y"] + 9}, **words)
    with pytest.raises(DataError, match=r"spoken\.npz: sample .* has the label"):
        build(name, path=file)
    for wrong in ("y", "speaker", *words):
        np.savez(file, **{**arrays, **words, wrong: np.array(3)})
        with pytest.raises(DataError, match=rf"spoken\.npz: {wrong} has the shape \(\)"):
            build(name, path=file)
    np.savez(file, x=arrays["x"])
    with pytest.raises(DataError, match=r"spoken\.npz: has the arrays \['x'\]"):
        build(name, path=file)
    file.write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="not a readable npz"):
        build(name, path=file)


# shakespeare


def test_shakespeare(tmp_path):
    play = "".join(f"{role}:\n{'To be, or not to be: ' * 10}{role}!\n\n" for role in ("A", "B", "A", "C"))
    plain, table = tmp_path / "input.txt", tmp_path / "play.csv.gz"
    plain.write_text(play)
    population = build("shakespeare", path=plain, min_characters=200, window=20, stride=3)
    check(population)
    assert population.names == ("A", "B", "C") and population.shape == (20,)
    words = "To be, or not to be: " * 10 + "A!"
    whole = words + "\n\n" + words
    mine = population.train(0)
    for number in range(len(mine)):
        text = "".join(population.label_names[token] for token in mine.inputs[number])
        assert text == whole[3 * number : 3 * number + 20]
        assert population.label_names[mine.labels[number]] == whole[3 * number + 20]
    with gzip.open(table, "wt", newline="") as file:
        csv.writer(file).writerows([["role", "text"], ["A", whole], ["B", words[:-2] + "B!"]])
    same = build("shakespeare", path=table, min_characters=200, window=20, stride=3)
    assert same.names == ("A", "B") and same.size(0) == population.size(0)


def test_shakespeare_tests_on_what_was_not_trained_on(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text("A:\n" + "".join(chr(0x4E00 + number) for number in range(400)))  # no character twice
    population = build("shakespeare", path=file, min_characters=300, window=10, stride=1)
    seen = set(population.train(0).inputs.flatten().tolist()) | set(population.train(0).labels.tolist())
    assert not seen & set(population.test().labels.tolist())
    assert population.size(0) == 350 and len(population.test()) == 40


def test_shakespeare_broken(tmp_path):
    file = tmp_path / "play.csv"
    file.write_text("who,what\nA,B\n")
    with pytest.raises(DataError, match=r"play\.csv: has the columns"):
        build("shakespeare", path=file)
    file.with_suffix(".txt").write_text("nobody speaks")
    with pytest.raises(DataError, match="no role speaks"):
        build("shakespeare", path=file.with_suffix(".txt"))
    file.with_suffix(".txt").write_text("A:\nhello")
    with pytest.raises(UsageError, match="too short"):
        build("shakespeare", path=file.with_suffix(".txt"), window=2000)
    file.with_suffix(".txt").write_text("A:\n" + "hello " * 300)
    with pytest.raises(DataError, match="nothing is left for a test set; raise test_fraction"):
        build("shakespeare", path=file.with_suffix(".txt"), test_fraction=1e-6)
    zipped = gzip.compress(b"A:\nhello")
    file.with_suffix(".gz").write_bytes(zipped[:10] + b"\xff" * 20)
    with pytest.raises(DataError, match=r"play\.gz: not a readable text"):
        build("shakespeare", path=file.with_suffix(".gz"))


# your own


def write_images(root: Path, rng, counts: dict[str, int], labels=("cat", "dog"), shape=(8, 8, 3)) -> None:
    image = pytest.importorskip("PIL.Image")
    for client, count in counts.items():
        for number in range(count):
            folder = root / client / labels[number % len(labels)]
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / f"{number}.png")


def test_folder(tmp_path, rng):
    write_images(tmp_path / "own", rng, {"ann": 30, "bob": 24, "tim": 3})
    population = build("folder", path=tmp_path / "own")
    check(population)
    assert population.names == ("ann", "bob") and population.label_names == ("cat", "dog")
    assert population.shape == (3, 8, 8) and len(population.mean) == 3
    grey = build("folder", path=tmp_path / "own", channels=1, image_size=6)
    assert grey.shape == (1, 6, 6)
    check(grey)


def test_folder_with_a_test_set_or_a_partition(tmp_path, rng):
    own = tmp_path / "own"
    write_images(own / "train", rng, {"ann": 30, "bob": 24})
    write_images(own, rng, {"test": 6})
    population = build("folder", path=own)
    assert population.names == ("ann", "bob") and population.size(0) == 30 and len(population.test()) == 6
    assert build("folder", path=own, held_out="samples", min_samples=1).names == ("ann", "bob")
    plain = tmp_path / "plain"
    write_images(plain, rng, {".": 60})
    dealt = build("folder", path=plain, partition="shards", clients=6)
    check(dealt)
    assert dealt.clients == 6 and dealt.label_names == ("cat", "dog")
    with pytest.raises(UsageError, match="needs clients"):
        build("folder", path=plain, partition="shards")


def test_folder_broken(tmp_path, rng):
    own = tmp_path / "own"
    write_images(own, rng, {"ann": 30})
    (own / "ann" / "cat" / "bad.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"bad\.png: does not decode"):
        build("folder", path=own)
    (own / "nobody").mkdir()
    with pytest.raises(DataError, match="nobody: an empty client"):
        build("folder", path=own)
    assert build("folder", path=own, skip_broken=True).skipped == 2
    (own / "ann" / "cat" / "bad.png").write_bytes(png(rng, (9, 9, 3)))
    assert build("folder", path=own, skip_broken=True).skipped == 2
    (own / "nobody").rmdir()
    with pytest.raises(DataError, match="set image_size"):
        build("folder", path=own)


def test_arrays_in_memory_and_from_files(tmp_path, rng):
    inputs, labels = rng.integers(0, 256, (100, 3, 8, 8), np.uint8), rng.integers(0, 5, 100)
    owners = np.repeat(["ann", "bob"], 50)
    population = build("arrays", inputs=inputs, labels=labels, owners=owners, classes=5)
    check(population)
    assert population.names == ("ann", "bob") and population.shape == (3, 8, 8)
    np.savez(tmp_path / "own.npz", inputs=inputs, labels=labels, owners=owners)
    (tmp_path / "own").mkdir()
    for name, array in (("inputs", inputs), ("labels", labels), ("owners", owners)):
        np.save(tmp_path / "own" / f"{name}.npy", array)
    for path in ("own.npz", "own"):
        same = build("arrays", path=tmp_path / path, classes=5)
        assert torch.equal(same.train(1).inputs, population.train(1).inputs)
        assert torch.equal(same.test().labels, population.test().labels)
    assert isinstance(same.inputs, np.memmap)
    last = build("arrays", inputs=inputs.transpose(0, 2, 3, 1), labels=labels, owners=owners, channels_last=True)
    assert torch.equal(last.train(0).inputs, population.train(0).inputs)


def test_arrays_of_features_tokens_and_a_test_set(rng):
    labels, owners = rng.integers(0, 3, 60), np.repeat([3, 1], 30)
    features = build("arrays", inputs=rng.normal(5, 2, (60, 7)), labels=labels, owners=owners)
    check(features)
    assert features.shape == (7,) and features.names == ("1", "3")
    tokens = build("arrays", inputs=rng.integers(0, 9, (60, 7)), labels=labels, owners=owners, tokens=True)
    check(tokens)
    assert tokens.transform(tokens.train(0).inputs).dtype == torch.int64
    images = rng.random((60, 4, 4), np.float32)
    tested = build(
        "arrays", inputs=images, labels=labels, owners=owners, test_inputs=images[:5], test_labels=labels[:5]
    )
    assert tested.size(0) == 30 and torch.equal(tested.test().inputs, torch.from_numpy(images[:5]))
    options = {"inputs": images, "labels": labels, "owners": owners, "held_out": "samples"}
    unused = build("arrays", test_inputs=images[:5], test_labels=labels[:5], **options)
    assert [unused.size(client) for client in range(2)] == [27, 27]  # the set apart goes to nobody
    masked = build("arrays", inputs=images, labels=labels, owners=owners, test=np.arange(60) % 10 == 0)
    assert masked.size(0) == 27 and len(masked.test()) == 6


@pytest.mark.parametrize("kind", partition.KINDS)
def test_arrays_dealt_out(rng, kind):
    labels = rng.integers(0, 10, 500)
    population = build("arrays", inputs=rng.random((500, 4)), labels=labels, partition=kind, clients=20)
    check(population)
    assert population.clients == 20
    again = build("arrays", inputs=rng.random((500, 4)), labels=labels, partition=kind, clients=20, seed=1)
    assert not np.array_equal(population.rows, again.rows)


def test_arrays_broken(rng):
    good = {"inputs": rng.random((60, 4)), "labels": np.zeros(60, int), "owners": np.repeat([0, 1], 30)}
    hole = good["inputs"].copy()
    hole[7, 2] = np.nan
    for change, reason in (
        ({"inputs": hole}, "sample 7 holds numbers that are not finite"),
        ({"labels": np.full(60, -1)}, "label -1"),
        ({"labels": np.zeros(59, int)}, "as many"),
        ({"labels": np.array(["a"] * 60)}, "labels must be numbers, one or a row a sample"),
        ({"inputs": np.array(["a"] * 60)}, "inputs are"),
        ({"labels": None}, "labels missing"),
        ({"labels": np.array(3)}, r"labels have the shape \(\)"),
        ({"owners": np.zeros((60, 2), int)}, r"owners have the shape \(60, 2\)"),
        ({"test": np.zeros((60, 2), bool)}, r"test have the shape"),
        ({"test_inputs": np.zeros((2, 4)), "test_labels": np.array(3)}, "test_labels have the shape"),
        ({"test_inputs": hole}, "test_labels"),
    ):
        with pytest.raises(DataError, match=reason):
            build("arrays", **{**good, **change})
    with pytest.raises(UsageError, match="either owners"):
        build("arrays", **{**good, "owners": None})


class Feature:
    names = ("cat", "dog")


class Rows(list):
    """As much of a Hugging Face Dataset as we use."""

    features = {"label": Feature()}  # noqa: RUF012


class Partitioner:
    """As much of a flwr-datasets partitioner as we use."""

    def __init__(self, parts):
        self.parts, self.num_partitions = parts, len(parts)

    def load_partition(self, number):
        return self.parts[number]


def rows_of(rng, count: int, shape=(8, 8, 3)) -> Rows:
    image = pytest.importorskip("PIL.Image")
    return Rows(
        {
            "image": image.fromarray(rng.integers(0, 256, shape, np.uint8)),
            "label": number % 2,
            "user": f"u{number % 3}",
        }
        for number in range(count)
    )


def test_huggingface(rng):
    rows = rows_of(rng, 90)
    population = build("huggingface", dataset=rows, owner_column="user")
    check(population)
    assert population.names == ("u0", "u1", "u2") and population.shape == (3, 8, 8)
    assert population.label_names == ("cat", "dog") and len(population.test()) == 9
    both = {"train": rows, "test": rows_of(rng, 7)}
    dealt = build("huggingface", dataset=both, test_split="test", partition="dirichlet", clients=5, channels=1)
    check(dealt)
    assert dealt.clients == 5 and len(dealt.test()) == 7 and dealt.shape == (1, 8, 8)
    parts = [rows_of(rng, 30 + number) for number in range(11)]
    parted = build("huggingface", partitioner=Partitioner(parts), test_dataset=rows_of(rng, 4))
    assert [parted.size(client) for client in range(11)] == list(range(30, 41)) and len(parted.test()) == 4


def test_huggingface_broken(rng):
    rows = rows_of(rng, 90)
    with pytest.raises(UsageError, match=r"no column 'picture'\. Known: image, label, user"):
        build("huggingface", dataset=rows, owner_column="user", input_column="picture")
    with pytest.raises(UsageError, match="no split 'test'"):
        build("huggingface", dataset={"train": rows}, owner_column="user", test_split="test")
    with pytest.raises(UsageError, match="owner_column"):
        build("huggingface", dataset=rows)
    rows[4]["image"], rows[5]["image"] = "no image", rows_of(rng, 1, (9, 9, 3))[0]["image"]
    with pytest.raises(DataError, match="row 4: image is neither an image nor numbers"):
        build("huggingface", dataset=rows, owner_column="user")
    assert build("huggingface", dataset=rows, owner_column="user", skip_broken=True).skipped == 2
    with pytest.raises(DataError, match="partition '1': an empty client"):
        build("huggingface", partitioner=Partitioner([rows_of(rng, 30), Rows()]))


def test_huggingface_labels_are_whole_numbers(rng):
    rows = rows_of(rng, 90)
    for row in rows:
        row["label"] = float(row["label"])
    assert build("huggingface", dataset=rows, owner_column="user").classes == 2  # 0.0 and 1.0 are whole
    for wrong, found in ((1.7, "found 1.7"), (float("nan"), "NaN"), (float("inf"), "infinity")):
        rows[5]["label"] = wrong
        with pytest.raises(DataError, match=f"'label': labels are neither names nor whole numbers .*{found}"):
            build("huggingface", dataset=rows, owner_column="user")


@pytest.mark.parametrize("skip_broken", [False, True])
def test_huggingface_unknown_owner_column(rng, skip_broken):
    rows = rows_of(rng, 90)
    with pytest.raises(UsageError, match=r"no column 'usr'\. Known: image, label, user"):
        build("huggingface", dataset=rows, owner_column="usr", skip_broken=skip_broken)
    unowned = Rows({"image": row["image"], "label": row["label"]} for row in rows[:7])
    tested = build("huggingface", dataset=rows, test_dataset=unowned, owner_column="user", skip_broken=skip_broken)
    assert len(tested.test()) == 7 and tested.clients == 3 and not tested.skipped


def test_huggingface_a_test_set_does_not_change_the_order_of_clients(rng):
    rows = rows_of(rng, 120)
    for number, row in enumerate(rows):
        row["user"] = number % 12
    options = {"dataset": rows, "owner_column": "user", "min_samples": 1}
    plain, tested = build("huggingface", **options), build("huggingface", test_dataset=rows[:20], **options)
    assert plain.names == tested.names == tuple(map(str, range(12)))
    few = build("huggingface", test_dataset=rows[:20], clients=3, **options)
    assert few.names == ("0", "1", "2") and len(few.test()) == 20


@pytest.mark.parametrize("more", [{"owner_column": "user"}, {"partition": "iid", "clients": 3}])
def test_huggingface_a_partitioner_alone_says_who_owns_what(rng, more):
    partitioner = Partitioner([rows_of(rng, 30), rows_of(rng, 30)])
    with pytest.raises(UsageError, match=f"found {next(iter(more))} = .* beside a partitioner"):
        build("huggingface", partitioner=partitioner, **more)


def test_huggingface_labels_and_splits_that_do_not_fit(rng):
    class Named(list):
        features: ClassVar = {"label": SimpleNamespace(names=["a", "b"])}

    rows = [{"image": rng.random((4, 4)), "label": "ab"[i % 2], "user": i % 2} for i in range(60)]
    options = {"owner_column": "user", "min_samples": 1}
    assert build("huggingface", dataset=Named(rows), **options).label_names == ("a", "b")
    with pytest.raises(DataError, match="'c' is none of its classes a, b"):
        build("huggingface", dataset=Named([*rows, {**rows[0], "label": "c"}]), **options)
    with pytest.raises(DataError, match="neither names nor whole numbers"):
        build("huggingface", dataset=[*rows, {**rows[0], "label": 3}], **options)
    with pytest.raises(UsageError, match="no splits"):
        build("huggingface", dataset=rows, test_split="test", **options)
    with pytest.raises(UsageError, match="test_dataset alone"):
        build("huggingface", dataset={"train": rows, "test": rows}, test_split="test", test_dataset=rows, **options)


def test_huggingface_by_name_names_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install 'datasets'"):
        build("huggingface", dataset="mnist", owner_column="user")


# mean and deviation


def test_mean_and_deviation_look_at_no_more_than_ten_thousand_samples_in_little_memory():
    inputs = np.zeros((19_999, 28, 28), np.uint8)
    inputs[1::2] = 255  # every other sample, which nobody looks at
    tracemalloc.start()
    try:
        mean, std = moments(inputs, np.arange(len(inputs)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mean.tolist() == [0.0] and std.tolist() == [1.0]
    assert peak < inputs.nbytes / 4


@pytest.mark.parametrize("shape", [(700, 3, 20, 30), (700, 20, 30), (9000, 12), (2, 300, 300)])
def test_mean_and_deviation_in_chunks_are_those_of_the_whole(rng, shape):
    axes = (0, 2, 3) if len(shape) == 4 else None
    for inputs in (rng.integers(0, 256, shape, np.uint8), rng.normal(1e8, 1, shape)):  # far from zero: rounding
        mean, std = moments(inputs, rng.permutation(shape[0]))
        assert mean == pytest.approx(np.atleast_1d(inputs.mean(axis=axes)), rel=1e-12)
        assert std == pytest.approx(np.atleast_1d(inputs.std(axis=axes)), rel=1e-6)


# the cache


def test_the_cache_is_hit_mapped_and_renewed(tmp_path, rng):
    file = write_leaf(tmp_path / "leaf", rng)
    seen: list[tuple[int, int]] = []
    progress = lambda *at: seen.append(at)
    load = lambda **more: build("femnist", path=tmp_path / "leaf", progress=progress, **more)
    first = load()
    assert len(seen) == 1 and isinstance(first.inputs, np.memmap) and not first.inputs.flags.writeable
    assert load(channels=3, seed=1, clients=1).clients == 1
    assert len(seen) == 1  # what only selects does not read again
    first.train(0).inputs.zero_()  # a client's samples are a copy
    assert first.train(0).inputs.any()
    write_leaf(tmp_path / "leaf", rng, users=("new", "f00"))
    assert load().names == ("f00", "new") and len(seen) == 2
    (entry,) = cache.folder().iterdir()
    (home,) = entry.iterdir()  # the outdated one is gone, and no temporary one is left
    data = (home / "inputs.npy").read_bytes()
    index = (home / "index.json").read_bytes()
    for name, damaged in (
        ("inputs.npy", b""),
        ("inputs.npy", bytes(len(data))),  # what a power failure leaves of a file that was not synced
        ("inputs.npy", data[:-1] + bytes([data[-1] ^ 1])),
        ("index.json", index.replace(b'"inputs"', b'"inputz"')),
        ("index.json", index[:-5]),
        ("index.json", b"3"),
    ):
        (home / name).write_bytes(damaged)
        with pytest.warns(UserWarning, match=f"the cached data in {home} are damaged and are made again: "):
            again = load()
        assert np.array_equal(again.inputs, load().inputs) and (home / "inputs.npy").read_bytes() == data
    assert again.names == ("f00", "new") and len(seen) == 8 and file.exists()
    (home / "index.json").write_text(json.dumps(list(json.loads(index))))  # of an earlier version
    with warnings.catch_warnings(action="error"):
        assert load().names == ("f00", "new") and len(seen) == 9


def test_the_cache_outlasts_a_power_failure(tmp_path, monkeypatch):
    """Every file is on the disk before its name is, and all names before the entry has one."""
    done, rename = [], os.rename
    monkeypatch.setattr(files_module, "sync_folder", lambda folder: done.append(("folder", folder.name)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(("file", "")))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(("rename", "")), rename(a, b)))
    source = tmp_path / "source"
    source.write_text("x")
    cache.cached("x", [source], {}, lambda: {"a": np.arange(3)})
    (place,) = cache.folder().iterdir()
    kinds = [kind for kind, _ in done]
    at = kinds.index("rename")
    assert kinds[:at].count("file") == 2  # the array and the index
    assert kinds[at - 1] == "folder" and done[at + 1] == ("folder", place.name)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("GLUEFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "gluefl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "gluefl"


def test_a_failed_pass_leaves_no_entry(tmp_path, monkeypatch):
    def fail() -> cache.Arrays:
        raise DataError("broken")

    source = tmp_path / "source"
    source.write_text("x")
    with pytest.raises(DataError, match="broken"):
        cache.cached("x", [source], {}, fail)
    assert not cache.folder().exists()
    assert cache.cached("x", [source], {}, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert cache.cached("x", [source], {}, fail)["a"].tolist() == [0, 1, 2]
    monkeypatch.setenv("GLUEFL_CACHE", str(source))  # a file: nothing can be written below it
    with pytest.raises(DataError, match="set GLUEFL_CACHE"):
        cache.cached("x", [source], {}, lambda: {"a": np.arange(3)})


# building by name


def test_build_names_what_is_wrong(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="did you mean 'femnist'"):
        build("femnits")
    with pytest.raises(UsageError, match=r"no option 'min_sample' .did you mean 'min_samples'"):
        build("femnist", min_sample=3)
    with pytest.raises(UsageError, match="min_samples must be a whole number, found '22'"):
        build("femnist", path=tmp_path, min_samples="22")
    with pytest.raises(UsageError, match="clients must be"):
        build("femnist", path=tmp_path, clients=2.5)
    monkeypatch.setenv("GLUEFL_DATA", str(tmp_path))
    (tmp_path / "here").mkdir()
    with pytest.raises(DataError, match=r"here: holds no train/\*\.json"):
        build("femnist", path="here")


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in ("glyphs", "glyphs_skewed", "huggingface")])
def test_missing_data_names_the_file_and_how_to_get_it(name, tmp_path):
    with pytest.raises(UsageError, match="needs path"):
        build(name)
    with pytest.raises(DataError, match=r"nowhere does not exist.*To get it: .{20}"):
        build(name, path=tmp_path / "nowhere")


def test_glyphs_by_name():
    pytest.importorskip("gluefl.populations.glyphs")
    check(build("glyphs", clients=5))


# partitioning: laws

labelled = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.just(seed), st.integers(1, 12), st.integers(1, 400), st.integers(1, 40))
)


@settings(max_examples=60, deadline=None)
@given(labelled, st.floats(0.001, 100), st.sampled_from(partition.KINDS), st.integers(1, 3))
def test_every_sample_goes_to_exactly_one_client_and_none_is_empty(drawn, alpha, kind, per_client):
    seed, classes, samples, clients = drawn
    labels = stream(seed, "labels").integers(0, classes, samples)
    needed = clients * (per_client if kind == "shards" else 1)
    deal = lambda: partition.owners(kind, labels, clients, stream(seed, "deal"), alpha, per_client)
    if samples < needed:
        with pytest.raises(UsageError, match="too few"):
            deal()
        return
    owners = deal()
    assert owners.shape == labels.shape and set(owners) == set(range(clients))
    assert np.array_equal(owners, deal())  # a pure function of its generator


@settings(max_examples=40, deadline=None)
@given(labelled, st.floats(0.001, 100), st.integers(1, 5))
def test_parts_cover_all_rows_and_hold_the_smallest_size(drawn, alpha, smallest):
    seed, classes, samples, clients = drawn
    labels = stream(seed, "labels").integers(0, classes, samples)
    if samples < clients * smallest:
        return
    for parts in (
        partition.dirichlet(labels, clients, alpha, stream(seed, "a"), smallest),
        partition.quantity(samples, clients, alpha, stream(seed, "b"), smallest),
    ):
        assert len(parts) == clients and min(map(len, parts)) >= smallest
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


@settings(max_examples=40, deadline=None)
@given(labelled)
def test_iid_shares(drawn):
    seed, _, samples, clients = drawn
    if samples >= clients:
        sizes = [len(part) for part in partition.iid(samples, clients, stream(seed, "iid"))]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == samples


@settings(max_examples=40, deadline=None)
@given(labelled, st.floats(0.01, 10), st.floats(0.05, 1))
def test_thinning_keeps_a_share_without_repeats(drawn, alpha, keep):
    seed, classes, samples, _ = drawn
    labels = stream(seed, "labels").integers(0, classes, samples)
    kept = partition.thinned(labels, classes, alpha, keep, stream(seed, "thin"))
    assert len(set(kept.tolist())) == len(kept) == int(np.ceil(keep * samples))


def test_alpha_sets_the_skew_and_shards_bound_the_labels():
    labels = np.repeat(np.arange(10), 500)

    def skew(alpha: float) -> float:
        parts = partition.dirichlet(labels, 50, alpha, stream(0, "skew"))
        return float(np.mean([np.bincount(labels[rows]).max() / len(rows) for rows in parts]))

    assert skew(0.05) > 0.6 > skew(1.0) > skew(100.0) and skew(100.0) < 0.2
    for rows in partition.shards(labels, 50, 2, stream(0, "shards")):
        assert len(set(labels[rows])) <= 2 and len(rows) == 100
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="alpha"):
            partition.dirichlet(labels, 5, wrong, stream(0, "x"))


# real data


def test_real_mnist_by_writer():
    population = build("mnist_writers", path=real("images/mnist_by_writer.npz"))
    check(population)
    assert population.clients == 679
    official = build("mnist_writers", path=real("images/mnist_by_writer.npz"), held_out="official")
    assert official.clients == 538 and len(official.test()) == 10_000


@pytest.mark.parametrize(
    ("name", "path", "speakers", "classes"),
    [
        ("spoken_digits", "speech/audiomnist_logmel32.npz", 60, 10),
        ("commands", "speech/arabic_commands_logmel32.npz", 30, 40),
    ],
)
def test_real_speech_features(name, path, speakers, classes):
    population = build(name, path=real(path))
    check(population)
    assert (population.clients, population.classes) == (speakers, classes)


def test_real_shakespeare():
    population = build("shakespeare", path=real("text/tinyshakespeare_by_role.csv.gz"))
    check(population)
    assert population.clients == 141


def test_real_speech_label_counts():
    with np.load(real("speech/speech_commands_v2_client_label_counts.npz")) as file:
        counts, words = file["counts"].astype(int), tuple(file["words"].tolist())
    assert words == WORDS
    kept = enough(counts.sum(axis=1), 22)
    assert len(kept) == 2066 and counts[kept].sum() == 100_929
