"""Code written for flash-attn runs by changing its import."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import rooftile as rt
from rooftile import CAUSAL, FULL, InvalidInput, Unsupported, Window
from rooftile.exact import reference
from rooftile.integrations import flash_attn
from rooftile.integrations.flash_attn.arguments import mask_of

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# as in flash_attn_interface.py of version 2
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {VARLEN}, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {VARLEN}, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert shown == SIGNATURES[name]
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)


def inputs(T=9, S=13, H=4, Hk=2, D=8):
    return tuple(torch.randn(2, n, h, D, requires_grad=True) for n, h in ((T, H), (S, Hk), (S, Hk)))


def exact(q, k, v, mask=FULL, **options):
    o, lse = reference.attention(*(x.double() for x in (q, k, v)), mask, **options)
    return o.to(q.dtype), lse.to(q.dtype)


@pytest.mark.parametrize(
    ("given", "mask", "due"),
    [
        ({}, FULL, {}),
        ({"causal": True}, CAUSAL, {}),
        ({"causal": True, "window_size": (3, -1)}, CAUSAL & Window(3), {}),
        ({"causal": True, "window_size": (3, 5)}, CAUSAL & Window(3), {}),
        ({"window_size": (3, 0)}, Window(3, 0), {}),
        ({"window_size": (-1, 2)}, Window(None, 2), {}),
        ({"window_size": [2, 2]}, Window(2, 2), {}),
        ({"softmax_scale": 0.5, "softcap": 2.0}, FULL, {"scale": 0.5, "softcap": 2.0}),
        ({"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, FULL, {"alibi": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
        ({"deterministic": True, "softcap": -1.0}, FULL, {}),
    ],
    ids=str,
)
def test_arguments_mean_what_they_mean_there(given, mask, due):
    q, k, v = inputs()
    o = flash_attn.flash_attn_func(q, k, v, **given)
    exact_o, exact_lse = exact(q, k, v, mask, **due)
    torch.testing.assert_close(o, exact_o)
    do = torch.randn_like(o)
    found, expected = (torch.autograd.grad(x, (q, k, v), do) for x in (o, exact_o))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    o, lse, weights = flash_attn.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    torch.testing.assert_close((o, lse), (exact_o, exact_lse))
    assert lse.shape == (2, 4, 9)
    assert weights is None


def test_rows_that_see_nothing_are_zero():
    q, k, v = inputs(T=5, S=2)
    o = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert not o[:, :3].any()
    torch.testing.assert_close(o[:, 3], v[:, 0].repeat_interleave(2, dim=1))


def test_everything_by_position():
    q, k, v = inputs()
    slopes = torch.rand(2, 4)
    found = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, -1), 5.0, slopes, True, True)
    due = exact(q, k, v, CAUSAL & Window(4), scale=0.3, softcap=5.0, alibi=slopes)
    torch.testing.assert_close(found[:2], due)


@pytest.mark.parametrize("probabilities", [False, True])
def test_packed_tensors(probabilities):
    q, k, v = inputs(T=7, S=7, Hk=4)
    arguments = (0.0, None, True, (3, -1), 2.0, None, False, probabilities)
    due = flash_attn.flash_attn_func(q, k, v, *arguments)
    torch.testing.assert_close(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), *arguments), due)
    torch.testing.assert_close(flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), *arguments), due)


def test_sequences_back_to_back():
    cu_q = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    cu_k = torch.tensor([0, 6, 9, 20], dtype=torch.int32)
    q, k, v = torch.randn(11, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    arguments = (cu_q, cu_k, 7, 11, 0.0, 0.4, True, (5, -1), 0.0, None, False, True)
    o, lse, weights = flash_attn.flash_attn_varlen_func(q, k, v, *arguments)
    due = reference.attention_packed(q, k, v, cu_q, cu_k, CAUSAL & Window(5), scale=0.4)
    torch.testing.assert_close((o, lse), due)
    assert lse.shape == (4, 11)
    assert weights is None
    found = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *arguments)
    torch.testing.assert_close(found[:2], due)


def test_sequences_back_to_back_in_one_tensor():
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    qkv = torch.randn(11, 3, 4, 8, requires_grad=True)
    o = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, causal=True)
    due = reference.attention_packed(*qkv.unbind(1), cu, cu, CAUSAL)[0]
    torch.testing.assert_close(o, due)
    do = torch.randn_like(o)
    found, expected = (torch.autograd.grad(x, qkv, do)[0] for x in (o, due))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_dropout_drops():
    q, k, v = inputs(T=64, S=64)
    torch.manual_seed(0)
    o = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert not torch.equal(o, flash_attn.flash_attn_func(q, k, v, dropout_p=0.5))
    torch.manual_seed(0)
    assert torch.equal(o, flash_attn.flash_attn_func(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q: flash_attn.flash_attn_varlen_func(
                q[0], q, q, *[torch.tensor([0, 9])] * 2, 9, 9, 0.1, block_table=torch.zeros(1, 1, dtype=torch.int32)
            ),
            Unsupported,
            r"dropout_p is 0\.1 with block_table",
        ),
        (
            lambda q: flash_attn.flash_attn_with_kvcache(
                q, q, q, cache_seqlens=3, cache_leftpad=torch.tensor([0, 1]), block_table=torch.zeros(2, 1, dtype=torch.int32)
            ),
            Unsupported,
            "cache_leftpad is .* with a block_table",
        ),
        (
            lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, cache_leftpad=1),
            InvalidInput,
            r"cache_leftpad is 1; must be integers of shape \(2,\)",
        ),
        (lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, q), InvalidInput, "one of k and v is None"),
        (lambda q: flash_attn.flash_attn_with_kvcache(q, q[:, :0], q[:, :0]), InvalidInput, "room for at least one token"),
        (lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, q, q), InvalidInput, "cache_seqlens is None"),
        (
            lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=3),
            InvalidInput,
            "come to 12 tokens; the cache has room for 9",
        ),
        (
            lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, rotary_cos=torch.ones(9, 4)),
            InvalidInput,
            "rotary_sin is None; must be two tensors",
        ),
        (
            lambda q: flash_attn.flash_attn_func(q, q, q, window_size=3),
            InvalidInput,
            "window_size is 3; must be a pair",
        ),
        (
            lambda q: flash_attn.flash_attn_qkvpacked_func(q),
            InvalidInput,
            r"qkv is a torch\.float32 tensor \(2, 9, 4, 8\); must be a tensor \(B, T, 3, H, D\)",
        ),
        (
            lambda q: flash_attn.flash_attn_kvpacked_func(q, torch.randn(2, 9, 3, 4, 8)),
            InvalidInput,
            r"kv is .* must be a tensor \(B, S, 2, Hk, D\)",
        ),
        (lambda q: flash_attn.flash_attn_func(q, q, q, dropout_p=1.0), InvalidInput, "dropout is 1.0"),
    ],
    ids=[
        "block_table",
        "leftpad in blocks",
        "leftpad",
        "k without v",
        "no slots",
        "no lengths",
        "no room",
        "half a rotation",
        "window_size",
        "qkv",
        "kv",
        "dropout",
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 9, 4, 8))


def turned(x: torch.Tensor, place: int, interleaved: bool) -> torch.Tensor:
    """Rotates the first eight numbers of a row (D,) by its position, as complex numbers."""
    angles = place * torch.tensor([1.0, 0.3, 0.1, 0.03])
    pairs = x[:8].view(4, 2) if interleaved else x[:8].view(2, 4).T
    numbers = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(4), angles))
    return torch.cat(((numbers if interleaved else numbers.T).flatten(), x[8:]))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_is_appended_to_and_attended_to(paged: bool, interleaved: bool, causal: bool) -> None:
    held, T, H, Hk, D = [5, 0, 21], 3, 4, 2, 16
    k_cache, v_cache = torch.randn(2, 6, 24, Hk, D)
    lines = torch.tensor([4, 0, 2])
    angles = torch.arange(32.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    q, k, v = (torch.randn(3, T, h, D) for h in (H, Hk, Hk))
    due = []
    for b, n in enumerate(held):
        keys, values = k_cache[lines[b], :n], v_cache[lines[b], :n]
        turned_k = torch.stack([torch.stack([turned(k[b, t, h], n + t, interleaved) for h in range(Hk)]) for t in range(T)])
        places = [n + t * causal for t in range(T)]
        turned_q = torch.stack([torch.stack([turned(q[b, t, h], places[t], interleaved) for h in range(H)]) for t in range(T)])
        keys, values = torch.cat((keys, turned_k)), torch.cat((values, v[b]))
        due.append(rt.attention_with_lse(turned_q[None], keys[None], values[None], rt.CAUSAL if causal else rt.FULL, scale=0.2))
    cache = {"cache_batch_idx": lines}
    if paged:
        k_cache, v_cache = (x.view(18, 8, Hk, D) for x in (k_cache, v_cache))
        cache = {"block_table": (lines[:, None] * 3 + torch.arange(3)).int()}
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), torch.tensor(held, dtype=torch.int32), softmax_scale=0.2,
        causal=causal, rotary_interleaved=interleaved, return_softmax_lse=True, **cache,
    )  # fmt: skip
    torch.testing.assert_close(o, torch.cat([x for x, _ in due]))
    torch.testing.assert_close(lse, torch.cat([x for _, x in due]))
    # in place, after the tokens in the cache
    assert torch.equal(v_cache.view(6, 24, Hk, D)[4, 5:8], v[0])


@pytest.mark.parametrize("S", [64, 96, 33])
@pytest.mark.parametrize("Dv", [16, 8])
@pytest.mark.parametrize("cut", ["layer", "slice", "by-heads", "by-time", "one-only"])
def test_a_cache_of_any_strides_is_written_in_place(cut: str, S: int, Dv: int) -> None:
    """Equal to a contiguous copy of the cache, and what the cache is cut from changes in the new slots alone."""
    held, lines = torch.tensor([5, 20, 0], dtype=torch.int32), torch.tensor([3, 0, 2])

    def cache_of(D: int, cut: str) -> tuple[torch.Tensor, torch.Tensor]:
        whole = {
            "layer": lambda: torch.randn(4, 3, S, 2, D),
            "slice": lambda: torch.randn(4, S + 4, 2, D),
            "by-heads": lambda: torch.randn(4, 2, S, D),
            "by-time": lambda: torch.randn(S, 4, 2, D),
            "none": lambda: torch.randn(4, S, 2, D),
        }[cut]()
        view = {
            "layer": lambda: whole[:, 1], "slice": lambda: whole[:, 2 : S + 2], "by-heads": lambda: whole.transpose(1, 2),
            "by-time": lambda: whole.transpose(0, 1), "none": lambda: whole,
        }[cut]()  # fmt: skip
        return whole, view

    whole_k, k_cache = cache_of(16, "slice" if cut == "one-only" else cut)
    whole_v, v_cache = cache_of(Dv, "none" if cut == "one-only" else cut)
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, Dv)
    copies = k_cache.clone(memory_format=torch.contiguous_format), v_cache.clone(memory_format=torch.contiguous_format)
    before = whole_k.clone(), whole_v.clone()
    options = {"cache_seqlens": held, "cache_batch_idx": lines, "causal": True}
    due = flash_attn.flash_attn_with_kvcache(q, *copies, k, v, **options)
    found = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    torch.testing.assert_close(found, due)
    for view, copy, whole, old, new in zip((k_cache, v_cache), copies, (whole_k, whole_v), before, (k, v), strict=True):
        assert torch.equal(view, copy)
        assert torch.equal(view[lines[1], 20:22], new[1])
        assert int((whole != old).sum()) == new.numel()


@pytest.mark.parametrize("window", [torch.tensor([3, 0]), np.array([3, 0]), [np.int64(3), 0], (torch.tensor(3), torch.tensor(0))])
def test_a_window_from_tensors_and_numpy(window) -> None:
    q, k, v = inputs()
    due = flash_attn.flash_attn_func(q, k, v, window_size=(3, 0), softmax_scale=0.5)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window, softmax_scale=np.float32(0.5)), due)


def test_packed_queries_and_a_block_table() -> None:
    k, v = torch.randn(2, 6, 8, 2, 16)
    q = torch.randn(5, 4, 16)
    table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    cu_q, cu_k = torch.tensor([0, 4, 5]), torch.tensor([0, 12, 15])
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 12, causal=True, block_table=table)
    plain_k, plain_v = (torch.cat((x[3], x[1, :4], x[5, :3])) for x in (k, v))
    torch.testing.assert_close(out, rt.attention_packed(q, plain_k, plain_v, cu_q, cu_k, rt.CAUSAL))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"window_size": (7, 2)}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.5, 1.0])}],
    ids=["", "softcap", "window", "alibi"],
)
def test_keys_before_the_left_padding_are_not_seen(causal: bool, options: dict) -> None:
    """Positions are those of the cache, so causal, windows and ALiBi count as without padding."""
    k_cache, v_cache = torch.randn(2, 5, 40, 2, 16)
    q, k, v = torch.randn(3, 3, 4, 16), torch.randn(3, 3, 2, 16), torch.randn(3, 3, 2, 16)
    lengths, leftpad = torch.tensor([30, 20, 9]), torch.tensor([0, 13, 8], dtype=torch.int32)
    lines = torch.tensor([4, 0, 2])
    k_cache[0, :13] = float("nan")
    before = k_cache.clone()
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=lines, cache_leftpad=leftpad, causal=causal,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    mask = mask_of(causal, options.get("window_size", (-1, -1)))
    for n in range(3):
        seen = slice(int(leftpad[n]), int(lengths[n]) + 3)
        keys = k_cache[lines[n], seen], v_cache[lines[n], seen]
        due = rt.attention_with_lse(
            q[n, None].double(), keys[0][None].double(), keys[1][None].double(), mask, backend="eager",
            alibi=options["alibi_slopes"].double() if "alibi_slopes" in options else None, softcap=options.get("softcap"),
        )  # fmt: skip
        torch.testing.assert_close(o[n, None].double(), due[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[n, None].double(), due[1], rtol=1e-4, atol=1e-5)
        # new keys were written where they belong
        assert torch.equal(k_cache[lines[n], lengths[n] : lengths[n] + 3], k[n])
    untouched = torch.ones(5, 40, dtype=torch.bool)
    for n in range(3):
        untouched[lines[n], lengths[n] : lengths[n] + 3] = False
    assert torch.equal(k_cache[untouched].nan_to_num(), before[untouched].nan_to_num())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 3)}, {"softcap": 2.0}], ids=str)
def test_the_signs_of_the_weights_say_what_dropout_took(options: dict) -> None:
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    torch.manual_seed(5)
    plain = flash_attn.flash_attn_func(q, k, v, 0.4, **options)
    torch.manual_seed(5)
    o, lse, weights = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, **options)
    assert torch.equal(o, plain)
    assert weights.shape == (2, 4, 9, 12)
    kept = torch.where(weights > 0, weights, 0.0) / 0.6
    again = torch.einsum("bhts,bshd->bthd", kept, v.repeat_interleave(2, 2))
    torch.testing.assert_close(again, o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights.abs().sum(-1), (lse > -torch.inf).float())
    assert 0.2 < (weights < 0).sum() / (weights != 0).sum() < 0.6
    assert flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)[2] is None


def test_a_paged_forward_runs_where_gradients_are_on_and_its_backward_says_why_not() -> None:
    q = torch.randn(2, 1, 4, 16, requires_grad=True)
    cache = torch.randn(2, 2, 32, 2, 16)
    o, lse = flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=20, return_softmax_lse=True)
    due = flash_attn.flash_attn_with_kvcache(q.detach(), *cache, cache_seqlens=20)
    assert torch.equal(o, due)
    assert o.requires_grad
    for result in (o, lse):
        with pytest.raises(Unsupported, match="a backward through attention to a paged cache"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=20).requires_grad
