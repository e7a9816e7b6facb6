"""Plans of recurrences on split sequences: states that travel with maps, or tokens exchanged for heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recurrent.split import counts
from rooftile.recurrent.split.part import Part

METHODS = ("auto", "scan", "heads")
# an assumption, not a measurement: the FLOPs that kernels do while a link carries one byte (90 TFLOP/s and 350 GB/s)
FLOPS_PER_BYTE = 256
# the largest heads of the delta rule's kernels
LARGEST_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """A call of `gated_delta`; rows: sequences of a batch that cross a border, 1 in a pack."""

    ranks: int
    tokens: int  # on one rank, in all sequences
    rows: int
    Hk: int
    Hv: int
    Dk: int
    Dv: int
    itemsize: int = 2
    by_channel: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A method and its price.

    bytes_sent: the most that a rank sends in a forward.
    share: the FLOPs of the rank with most to do over one device's, forward and backward; 1 / P if nothing is computed twice.
    reason: the sentence that says why.
    """

    method: str
    bytes_sent: int
    share: float
    reason: str

    def __str__(self) -> str:
        return f"{self.method}: sends {self.bytes_sent:,} bytes, and has {self.share:.2f} of one device's FLOPs: {self.reason}"


def scan_bytes(sizes: DeltaSizes) -> int:
    """Returns the most bytes that a rank sends in a forward where states travel; the first rank has no matrix."""
    P, state = sizes.ranks, sizes.rows * sizes.Hv * sizes.Dk * 4
    return state * max((P - 1) * sizes.Dv, (P - 2) * (sizes.Dv + sizes.Dk), 0)


def heads_bytes(sizes: DeltaSizes) -> int:
    """Returns the bytes that a rank sends in a forward where tokens are exchanged for heads, and outputs for tokens."""
    return int(sizes.tokens * bytes_per_token(sizes))


def bytes_per_token(sizes: DeltaSizes) -> float:
    """Returns the bytes that leave a rank for one of its tokens: q, k, v, g and beta, and for the outputs of another's."""
    one = 2 * sizes.itemsize * (sizes.Hk * sizes.Dk + sizes.Hv * sizes.Dv)
    one += sizes.Hv * (4 * (sizes.Dk if sizes.by_channel else 1) + sizes.itemsize)
    return one * (sizes.ranks - 1) / sizes.ranks


def plan_delta(sizes: DeltaSizes, method: str = "auto") -> Plan:
    """Returns the method that costs less for each token: the bytes of an exchange, or the FLOPs of finding states first.

    The choice knows no length, so all ranks make the same one, whatever tokens they hold. The states that travel are few beside
    tokens, and count for nothing.

    Example:
        >>> plan_delta(DeltaSizes(ranks=4, tokens=16_384, rows=1, Hk=16, Hv=32, Dk=128, Dv=128)).method
        'heads'
    """
    if method not in METHODS:
        raise InvalidInput(f"method is {method!r}; must be one of {', '.join(map(repr, METHODS))}")
    P, sent, exchanged = sizes.ranks, scan_bytes(sizes), heads_bytes(sizes)
    passes = counts.gated_delta(sizes.Dk, sizes.Dv, sizes.Hv // sizes.Hk)
    if sizes.by_channel or max(sizes.Dk, sizes.Dv) > LARGEST_DIM:
        # plain operations find no states without outputs
        passes = passes._replace(alone=passes.whole, mapped=2 * passes.whole)
    share = passes.share(P)
    scan = Plan("scan", sent, share, f"exchanging heads would send {exchanged:,} bytes")
    heads = Plan("heads", exchanged, 1 / P, f"states with matrices would send {sent:,} bytes, with {share:.2f} of the FLOPs")
    if P == 1:
        return Plan("scan", 0, 1.0, "one rank holds all tokens")
    if sizes.Hk % P:
        sentence = f"{sizes.Hk} key heads are not a multiple of {P} ranks"
        if method == "heads":
            raise InvalidInput(f"method 'heads' deals heads out, and {sentence}: use method='scan'")
        return Plan("scan", sent, share, sentence)
    if method != "auto":
        return scan if method == "scan" else heads
    again = sizes.Hv * (passes.alone if P == 2 else passes.mapped)
    # a backward exchanges the gradients of what a forward has exchanged
    return heads if 2 * bytes_per_token(sizes) * FLOPS_PER_BYTE <= again else scan


def plan_ssd(ranks: int, rows: int, H: int, P: int, N: int, G: int) -> Plan:
    """Returns the price of states that travel: a state and a decay for each head that crosses a border.

    rows: sequences of a batch that cross it, 1 in a pack.

    Example:
        >>> print(plan_ssd(ranks=4, rows=1, H=64, P=64, N=128, G=1))
        scan: sends 6,291,456 bytes, and has 0.29 of one device's FLOPs: a state is smaller than the tokens that lead to it
    """
    if ranks == 1:
        return Plan("scan", 0, 1.0, "one rank holds all tokens")
    # the first rank has no decays to send, but the most ranks to send to
    sent = 4 * rows * H * max((ranks - 1) * P * N, (ranks - 2) * (P * N + 1))
    reason = "a state is smaller than the tokens that lead to it"
    return Plan("scan", sent, counts.ssd(P, N, H // G).share(ranks), reason)


def planned(part: Part, sizes: dict[str, int], q: Tensor, g: Tensor, method: str) -> Plan:
    """Returns the plan of a call with these tensors of one rank."""
    rows = 1 if part.cu is not None else sizes["B"]
    heads = {name: sizes[name] for name in ("Hk", "Hv", "Dk", "Dv")}
    tokens = q.shape[: 1 if part.cu is not None else 2].numel()
    by_channel = g.ndim == q.ndim
    given = DeltaSizes(ranks=part.ranks.count, tokens=tokens, rows=rows, itemsize=q.itemsize, by_channel=by_channel, **heads)
    return plan_delta(given, method)
