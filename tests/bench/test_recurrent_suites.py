"""The benchmarks of recurrences and of experts run on a CPU, and time a contestant only after its outputs were compared."""

from __future__ import annotations

from unittest import mock

import torch

from rooftile.cost.session import Session
from rooftile_lab.bench import expert_peers, fused_peers, mixers
from rooftile_lab.bench.suites import experts, recurrent
from tests.bench.test_fused_suites import SESSION, quiet


def test_recurrences_beside_peers() -> None:
    session: Session = SESSION
    found = list(recurrent.measure(session, recurrent.CPU, quiet))
    timed = {(row.case, row.backend, row.phase) for row in found if row.median_us is not None}
    assert {(f"small-{kind}", "rooftile", "fwd") for kind in recurrent.KINDS} <= timed
    assert ("small-conv", "torch", "fwd+bwd") in timed
    reasons = {row.backend: row.reason for row in found if row.reason}
    assert set(reasons) <= {"mamba-ssm", "mamba-ssm-fla", "fla", "flash-qla"}
    assert all(reason.startswith("refused: ModuleNotFoundError") for reason in reasons.values())


def test_layers_of_mamba2_and_of_attention_by_length() -> None:
    found = list(mixers.layers(SESSION, (48, 16), quiet, suite="recurrent", dim=64, head_dim=32))
    timed = {(row.case, row.backend, row.phase) for row in found if row.median_us is not None}
    assert timed == {
        (f"layer-{T}", who, phase) for T in (16, 48) for who in ("mamba2", "attention") for phase in ("fwd", "fwd+bwd")
    }
    ends = [row for row in found if row.case == "layer-crossover"]
    assert [row.phase for row in ends] == ["fwd", "fwd+bwd"]
    assert all(row.measures["longest_tokens"] == 48 for row in ends)


def test_a_mixer_equals_its_formula_and_a_wrong_one_shows() -> None:
    mixer = mixers.without_projections(2, 20, 2, torch.device("cpu"), torch.float32)
    assert not fused_peers.refusal(mixer.ours, mixer.plain, mixer.tensors)
    assert fused_peers.refusal(mixer.ours, lambda *given: mixer.plain(*given[:3], 1.1 * given[3]), mixer.tensors)


def test_experts_beside_grouped_products() -> None:
    found = {(row.backend, row.phase): row for row in experts.measure(SESSION, experts.CPU, quiet)}
    assert found["rooftile", "fwd"].measures["of_fastest_peer_ratio"] > 0
    assert found["rooftile", "fwd+bwd"].tflops > 0
    timed = {(who, phase) for (who, phase), row in found.items() if row.median_us is not None}
    plain = ("grouped-mm", "hf-grouped-mm", "hf-batched-mm")
    assert {(who, phase) for who in plain for phase in ("fwd", "fwd+bwd")} <= timed
    # these need a GPU and their own packages
    for who in set(expert_peers.PEERS) - set(plain):
        assert found[who, "fwd"].reason.startswith("refused: ModuleNotFoundError"), found[who, "fwd"].reason


def test_a_contestant_with_wrong_outputs_is_not_timed() -> None:
    with mock.patch.object(expert_peers, "swiglu", lambda x: x.chunk(2, -1)[0]):
        found = {row.backend: row for row in experts.measure(SESSION, experts.CPU, quiet) if row.phase == "fwd"}
    assert "its error is" in found["grouped-mm"].reason
    assert found["grouped-mm"].median_us is None


def test_inputs_of_a_zipf_load_are_uneven() -> None:
    torch.manual_seed(0)
    routing, _ = experts._inputs(experts.Sizes(16, 2, 8, 8), 2000, True, torch.device("cpu"), torch.float32)
    count = routing.experts.flatten().bincount(minlength=16)
    assert count[0] > 4 * count[15]
