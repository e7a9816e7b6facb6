"""The host's work between operators is named by the function that takes the time, and the way to operators is no work."""

from __future__ import annotations

import statistics
import sys
import textwrap
from pathlib import Path

import pytest

from rooftile.diagnosis.programs.diagnose_script import diagnose_script
from rooftile.diagnosis.watching.host_place import HostPlace, HostSampler, place_in, work_of_the_host

PIL, LOOP, MODEL = (
    HostPlace("data.py:3", "PIL.Image.Image.resize", "here"),
    HostPlace("train.py:9"),
    HostPlace("model.py:4", "x.forward"),
)


def test_many_short_gaps_count_and_the_way_to_operators_does_not() -> None:
    # ten rounds of 60 in the library, 20 on the way to an operator of 20, in 10 us
    gaps = [(10**6 * n, 10**6 * n + 800_000) for n in range(10)]
    operators = [(10**6 * n + 800_000, 10**6 * n + 1_000_000) for n in range(10)]
    seen = [
        (10**6 * n + 10_000 * at, place)
        for n in range(10)
        for at, place in ((20, PIL), (40, PIL), (60, PIL), (70, MODEL), (90, MODEL))
    ]
    found = work_of_the_host(seen, gaps, operators)
    assert found == {PIL: pytest.approx(8000 * 30 / 40)}
    assert work_of_the_host([], gaps, operators) == {}
    # as short as the time between two operators: only the script's own line is no library on its way to the next
    own, short = HostPlace("env.py:4", is_own=True), [(0, 200_000), (300_000, 500_000)]
    assert work_of_the_host([(20, PIL)], short, []) == {}
    samples = [(20, PIL), (40, own), (60, own), (400_000, MODEL)]
    assert work_of_the_host(samples, short, []) == {own: pytest.approx(200.0)}
    # its samples may be of the time before and after short operators
    assert work_of_the_host(samples, short, [], asking={"env.py:4"}) == {}
    # a place without a line is nobody's
    assert work_of_the_host([(1, HostPlace())], gaps, operators) == {}


def test_a_place_is_the_users_line_and_the_function_that_it_calls() -> None:
    found: list[HostPlace] = []

    def key(n: int) -> int:
        # called from the library, as deep as it takes its time
        found.append(place_in(sys._getframe(1)))
        return n

    statistics.multimode(map(key, [1, 1, 2]))
    line = test_a_place_is_the_users_line_and_the_function_that_it_calls.__code__.co_firstlineno + 8
    assert found[0].function == "statistics.multimode" or found[0].function.startswith("collections.")
    assert found[0].where.endswith(f"test_host_place.py:{line}")
    assert found[0].words == f"{found[0].function}, called at {found[0].where}"
    # the line itself
    assert place_in(sys._getframe()).function == ""
    assert place_in(sys._getframe()).is_own
    assert not found[0].is_own


def test_the_sampler_sees_the_thread_that_enters_it() -> None:
    with HostSampler() as sampler:
        end = statistics.NormalDist(0, 1)
        for _ in range(200):
            end.samples(300)
    places = {place.function for _, place in sampler.seen}
    assert "statistics.NormalDist.samples" in places
    assert [at for at, _ in sampler.seen] == sorted(at for at, _ in sampler.seen)


SCRIPT = """
import statistics, sys, torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, n):
        x = statistics.NormalDist(n).samples(6000)
        return torch.tensor(x[:8])

model = torch.nn.Linear(8, 2)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.utils.data.DataLoader(Data(), batch_size=4) if sys.argv[1] == "loads" else (
    torch.tensor([statistics.NormalDist(n).samples(24000)[:8]]) for n in range(400))
for x in source:
    model(x).sum().backward()
    optimiser.step()
"""


@pytest.mark.parametrize("kind", ["loads", "computes"])
def test_a_step_that_waits_for_its_data_says_where(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr("rooftile.diagnosis.remedies.propose.load.cores", lambda: 4)
    found = diagnose_script(str(path), [kind], budget=0.2)
    assert found.step.bound == "host"
    assert any("of the step in statistics.NormalDist.samples, called at " in note for note in found.notes), found.notes
    remedy = max(found.remedies, key=lambda remedy: remedy.predicted_us)
    assert remedy.name == ("load beside the step" if kind == "loads" else "remove a wait")
    assert "statistics.NormalDist.samples, called at" in remedy.how
    assert ("DataLoader(num_workers=" in remedy.how) == (kind == "loads")
