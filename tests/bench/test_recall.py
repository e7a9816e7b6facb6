"""The study of what training with each method loses: its task, its models, and its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile_lab.bench import rows
from rooftile_lab.bench.learning import needle, study
from rooftile_lab.bench.learning.english import BYTES, English, corpus
from rooftile_lab.bench.learning.methods import EXACT, METHODS, NOT_CAUSAL, decoder_of, mixer_of
from rooftile_lab.bench.learning.recall import NOTHING, Batch, Recall, by_distance, right
from rooftile_lab.bench.learning.training import train
from rooftile_lab.bench.suites import SUITES
from rooftile_lab.bench.suites import recall as suite
from rooftile_lab.cli.rows import show
from tests.bench.session import SESSION

TASK = Recall(length=32, pairs=(2, 8, 16), keys=20, values=5)
TINY = study.Plan(
    task=TASK, hidden=32, heads=2, layers=1, batch=6, steps=3, rates=(1e-3, 1e-2), tests=4, english_steps=2, english_rate=1e-3
)  # fmt: skip
CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def looked_up(task: Recall, tokens: Tensor) -> Tensor:
    """The answers of a reader who writes down each pair, and looks up each question: logits (B, T, vocab)."""
    first_pair = task.values + task.keys
    logits = torch.zeros(*tokens.shape, task.vocab_size)
    for row, text in enumerate(tokens.tolist()):
        known: dict[int, int] = {}
        for place, token in enumerate(text):
            if token >= first_pair:
                key, value = divmod(token - first_pair, task.values)
                assert key not in known, "a key was given twice"
                known[key] = value
            else:
                logits[row, place, known[token - task.values]] = 1.0
    return logits


def test_a_reader_who_looks_up_the_pair_is_always_right_and_a_guess_by_chance() -> None:
    batch = TASK.draw(30, generator())
    assert right(looked_up(TASK, batch.tokens), batch).all()
    guesses = torch.randint(TASK.values, (400, 32), generator=generator(1))
    many = TASK.draw_with(16, 400, generator(2))
    chance = right(torch.nn.functional.one_hot(guesses, TASK.vocab_size), many).float().mean().item()
    assert chance == pytest.approx(TASK.chance, abs=0.02)
    assert TASK.chance == 1 / 5


@pytest.mark.parametrize("pairs", [1, 2, 16, 20])
def test_a_text_has_its_pairs_and_asks_in_all_other_places(pairs: int) -> None:
    task = Recall(length=32, pairs=(pairs,), keys=20, values=5)
    tokens, targets, distances = task.draw_with(pairs, 50, generator())
    is_pair = tokens >= task.values + task.keys
    assert (is_pair.sum(1) == pairs).all()
    assert torch.equal(targets == NOTHING, is_pair)
    assert torch.equal(distances > 0, ~is_pair)
    # the token at that distance is the pair of the question's key
    place = (torch.arange(32) - distances).clamp(min=0)
    pair = tokens.gather(1, place) - task.values - task.keys
    asked = ~is_pair
    assert torch.equal((pair // task.values)[asked], (tokens - task.values)[asked])
    assert torch.equal((pair % task.values)[asked], targets[asked])


def test_distances_cover_the_text_and_pairs_stand_anywhere() -> None:
    tokens, _, distances = TASK.draw_with(8, 500, generator())
    assert set(range(1, 32)) <= set(distances.unique().tolist())
    assert (tokens >= TASK.values + TASK.keys).any(0).all()
    assert (tokens[:, 1:] < TASK.values + TASK.keys).any(0).all()


@pytest.mark.parametrize("depth", [0.0, 0.5, 0.95])
def test_a_needle_is_asked_for_last_and_stands_at_its_depth(depth: float) -> None:
    batch = TASK.with_needle(depth, 20, generator())
    assert (batch.targets[:, :-1] == NOTHING).all()
    place = 31 - batch.distances[:, -1]
    assert (place < 31).all()
    assert (place - depth * 31).abs().float().mean() < 1.5
    assert right(looked_up(TASK, batch.tokens), batch).all()


def test_shares_by_distance_are_those_of_each_range() -> None:
    rights = torch.tensor([True, False, True, True, False])
    assert by_distance(rights, torch.tensor([1, 4, 5, 8, 32]), [4, 8, 16, 32]) == {4: 0.5, 8: 1.0, 32: 0.0}
    assert TASK.buckets() == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"pairs": (32,)}, "pairs go up to 32 and length is 32; a text must have room for a question too"),
        ({"pairs": (21,)}, "keys is 20 and values 5; must be at least 21, the most pairs, and 2"),
        ({"pairs": ()}, r"pairs is \(\); must be numbers of at least 1"),
        ({"values": 1}, "keys is 20 and values 1; must be"),
    ],
)
def test_a_task_that_does_not_fit_is_a_sentence(sizes: dict, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Recall(**({"length": 32, "pairs": (4,), "keys": 20, "values": 5} | sizes))


# the models


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_have_as_many_parameters_as_exact_attention(method: str) -> None:
    sizes = {"heads": 4, "hidden": 128, "layers": 2, "length": 128}
    due = decoder_of(EXACT, 100, **sizes).parameter_count
    found = decoder_of(method, 100, **sizes)
    # half of a column of gate, up and down in each layer
    assert abs(found.parameter_count - due) <= 3 * 128 * 2 / 2
    assert torch.equal(found.embedding.weight, decoder_of(EXACT, 100, **sizes).embedding.weight)


def test_only_linformer_sees_later_tokens() -> None:
    tokens = TASK.draw(6, generator()).tokens
    edited = tokens.clone()
    edited[:, 20:] = edited[:, 20:].flip(1)
    leaking = []
    for method in METHODS:
        model = decoder_of(method, TASK.vocab_size, heads=2, hidden=64, layers=2, length=32).eval()
        with torch.no_grad():
            if (model(edited) - model(tokens))[:, :20].abs().max() > 1e-4:
                leaking.append(method)
    assert tuple(leaking) == NOT_CAUSAL


def test_there_is_no_such_method_or_length() -> None:
    with pytest.raises(InvalidInput, match="there is no method 'flash'; has exact, linear"):
        mixer_of("flash", 64)
    with pytest.raises(InvalidInput, match="length is 48; must be a power of two"):
        mixer_of("linear", 48)
    with pytest.raises(InvalidInput, match=r"native_sparse has .* parameters more than exact attention"):
        decoder_of("native_sparse", 10, heads=1, hidden=16, layers=1, length=1024)


def test_exact_attention_learns_to_recall_in_a_few_steps() -> None:
    task = Recall(length=32, pairs=(2, 4), keys=4, values=2)
    torch.manual_seed(0)
    model = decoder_of(EXACT, task.vocab_size, heads=2, hidden=32, layers=1, length=32)
    source = generator()
    trained = train(model, lambda: task.draw(16, source)[:2], steps=80, rate=2e-2, device=CPU)
    assert len(trained.losses) == 80
    assert trained.is_finite
    assert sum(trained.losses[-5:]) < 0.5 * sum(trained.losses[:5])
    batch = task.draw(64, generator(9))
    with torch.no_grad():
        assert right(model(batch.tokens), batch).float().mean() > 0.9


# English


def test_the_held_out_text_is_not_trained_on_and_a_target_is_the_next_byte() -> None:
    text = English.read("cpu")
    assert torch.equal(torch.cat([text.train, text.test]), corpus())
    tokens, targets = text.draw(3, 16, generator())
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    tokens, targets = text.tests(4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens[0], text.test[:16])
    assert torch.equal(targets[-1], text.test[-16:])
    with pytest.raises(InvalidInput, match="the held-out text has"):
        text.tests(1, 10**7)


def test_the_loss_of_frequencies_is_that_of_bytes_drawn_by_them() -> None:
    found = study.learn_english("linear", TINY, English.read("cpu"), CPU, lambda words: None)
    counts = torch.bincount(corpus(), minlength=BYTES).double()
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * shares.log()).sum().item()
    assert found.frequencies_loss == pytest.approx(entropy, rel=0.1)
    assert found.loss > 3


# Loki


def test_with_all_keys_loki_is_the_exact_model_and_with_few_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = decoder_of(EXACT, TASK.vocab_size, heads=2, hidden=32, layers=2, length=32).eval()
    batch = TASK.with_needle(0.5, 8, generator())
    with torch.no_grad():
        whole = model(batch.tokens)[:, -1:]
    torch.testing.assert_close(needle.decode(model, batch.tokens, [None, None]), whole, atol=1e-5, rtol=1e-5)
    few = needle.needles(model, TASK, 8, generator())
    assert list(few) == list(needle.WAYS)
    assert all(list(shares) == list(needle.DEPTHS) for shares in few.values())
    lokis = needle.calibrated(model, batch.tokens)
    approximate = needle.decode(model, batch.tokens, [needle._by(loki, "token") for loki in lokis])
    assert (approximate - whole).abs().max() > 1e-3
    monkeypatch.setattr(needle, "KEEP", 1.0)
    lokis = needle.calibrated(model, batch.tokens)
    for unit in ("token", "page"):
        found = needle.decode(model, batch.tokens, [needle._by(loki, unit) for loki in lokis])
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


# the suite


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.PLANS, "cpu", TINY)


def test_the_suite_has_a_row_for_each_method_and_way(tiny: None) -> None:
    names = ["recall-exact", "recall-native_sparse", "english-linear", "needle"]
    found = list(SUITES["recall"].run(SESSION, names))
    assert [(row.case, row.backend, row.phase) for row in found] == [
        ("recall", "exact", "step"), ("recall", "native_sparse", "step"), ("english", "linear", "step"),
        *(("needle", way, "decode") for way in needle.WAYS),
    ]  # fmt: skip
    recalled = found[0]
    assert recalled.measures["chance_recall"] == 0.2
    shares = [recalled.measures[f"pairs_{pairs}_recall"] for pairs in TASK.pairs]
    assert recalled.measures["all_recall"] == pytest.approx(sum(shares) / 3, abs=1e-5)
    by_rate = recalled.settings["recall_by_rate"]
    assert list(by_rate) == ["0.001", "0.01"]
    assert recalled.measures["all_recall"] == max(by_rate.values()) == by_rate[f"{recalled.settings['rate']:g}"]
    assert recalled.median_us is not None
    assert found[2].measures.keys() == {"loss_nats", "frequencies_nats"}
    assert {f"depth_{depth}_recall" for depth in range(5, 100, 10)} < found[-1].measures.keys()


def test_a_method_that_fails_is_a_sentence_and_the_next_one_runs(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = study.learn_recall

    def failing(method: str, *rest: object) -> study.Recalled:
        if method == "linear":
            raise RuntimeError("no\nkernel")
        return learn(method, *rest)

    monkeypatch.setattr(suite, "learn_recall", failing)
    said: list[str] = []
    found = list(SUITES["recall"].run(SESSION, ["recall-linear", "recall-fixed"], say=said.append))
    assert [(row.backend, row.reason) for row in found] == [("linear", "failed: RuntimeError: no kernel"), ("fixed", "")]
    assert "recall-linear failed: RuntimeError: no kernel" in said


def test_rows_come_one_by_one(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(SUITES["recall"].run(SESSION, ["recall-exact", "recall-linear"]))
    assert next(found).backend == "exact"
    # the second has not begun
    monkeypatch.setattr(suite, "learn_recall", None)
    assert next(found).reason.startswith("failed: TypeError")


def test_a_loss_that_is_not_finite_at_any_rate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = study.Trained([float("nan")], [1.0])
    monkeypatch.setattr(study, "train", lambda *given, **named: lost)
    with pytest.raises(ArithmeticError, match="the loss of exact is not finite at any of the learning rates"):
        study.learn_recall(EXACT, TINY, CPU, lambda words: None)


def test_batches_are_what_the_task_says() -> None:
    batch = TASK.draw(6, generator())
    assert isinstance(batch, Batch)
    assert batch.tokens.shape == (6, 32)
    assert TASK.draw(1, generator()).tokens.shape == (3, 32)


def test_rows_without_a_time_are_shown_by_their_measures(capsys: pytest.CaptureFixture[str]) -> None:
    named = {"suite": "recall", "case": "needle", "phase": "decode"}
    few = rows.timed_row(SESSION, [], backend="loki-page", measures={"depth_5_recall": 0.75}, **named)
    show([few])
    assert "0.75" in capsys.readouterr().out
    many = rows.timed_row(SESSION, [2.0], backend="exact", measures={f"depth_{n}_recall": n / 64 for n in range(16)}, **named)
    show([few, many])
    said = capsys.readouterr().out
    assert "needle decode loki-page: depth_5_recall 0.75\n" in said
    assert "depth_15_recall 0.2344" in said
