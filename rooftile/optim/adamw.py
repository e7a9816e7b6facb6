"""`AdamW`: the optimiser of `torch.optim`, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from rooftile.errors import InvalidInput, Unsupported
from rooftile.optim.definition import StepNumbers
from rooftile.optim.operator import is_dense
from rooftile.optim.operator import step as take_step
from rooftile.optim.split import is_channels_last, join, own_rests, sums_of
from rooftile.runtime.words import answers_foreign_words


class AdamW(Optimizer):
    """AdamW with `torch.optim.AdamW`'s arguments, rule and names of states, each weight read and written once.

    On a GPU one Triton kernel takes a step of all weights of a dtype; elsewhere plain operations do, in PyTorch's order. States
    have the dtype of their weight, and fp32 under a split master; all is computed in fp32 and rounded once.

    With `torch.amp.GradScaler` it works as optimisers without a fused step do: the scaler unscales first, and skips steps.

    Args:
        params: weights, or dictionaries of groups, as in PyTorch. Weights without gradients are passed over.
        lr: a number, or a tensor () that is read on its device.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        maximize: whether weights follow their gradients upwards.
        capturable: counts steps on the device, so that a step can be captured in a CUDA graph. Take one step before.
        clip_norm: scales all gradients by min(1, clip_norm / norm), for the norm of all of them together, as
            `torch.nn.utils.clip_grad_norm_` does. The norm stays on the device, in `grad_norm`, and gradients as they were.
        master: "split" keeps the low 16 bits of each bf16 weight beside it: weight and rest are exactly an fp32 weight, which is
            trained, and nothing is stored twice. fp32 weights need none. Weights that others set between steps, by `copy_`,
            `load_state_dict` or through `.data`, lose the low bits that they had, and so do their neighbours: 2,048 weights that
            lie together are told from the weights of the last step by a sum over their bits.

    Raises:
        InvalidInput: a number is out of range, a weight is sparse, complex or in fp16 under a split master.
        Unsupported: amsgrad.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimiser = AdamW([w], lr=1e-4, clip_norm=1.0, master="split")
        >>> w.sum().backward()
        >>> optimiser.step()
        >>> optimiser.master_weight(w)
        tensor([0.9999, 0.9999, 0.9999])
    """

    @answers_foreign_words
    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, capturable: bool = False,
        clip_norm: float | None = None, master: Literal["split"] | None = None,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise Unsupported("amsgrad=True is not there; use torch.optim.AdamW for it")
        if clip_norm is not None and not clip_norm > 0:
            raise InvalidInput(f"clip_norm is {clip_norm}; must be above 0, or None")
        self.clip_norm = clip_norm
        # the norm of all gradients together at the last step with clip_norm, on the device
        self.grad_norm: Tensor | None = None
        # the mask of a weight by its id, and the decay of what it leaves out, for the next step alone
        self._left_out: dict[int, tuple[Tensor, float]] = {}
        names = ("lr", "betas", "eps", "weight_decay", "maximize", "capturable", "master")
        super().__init__(params, dict(zip(names, (lr, betas, eps, weight_decay, maximize, capturable, master), strict=True)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with settings of its own where it names them."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except InvalidInput:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step. `closure` computes the loss again, with gradients, and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: dict[tuple[Any, ...], list[Tensor]] = {}
        for n, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    work.setdefault((n, *self._kind(p, group)), []).append(p)
        clips = self._clips([p.grad for weights in work.values() for p in weights if p.grad is not None])
        for (n, *_), weights in work.items():
            self._step(self.param_groups[n], weights, clips)
        self._left_out.clear()
        return loss

    def decay_left_out(self, weight: Tensor, mask: Tensor, decay: float) -> None:
        """Adds decay * (1 - mask) * weight to the gradient of the next step, inside its pass: SR-STE, for 2:4 weights.

        The gradient is clipped first, by the norm of the gradient alone. Under a split master the fp32 weight decays.
        `rooftile.qat` calls this before each step for the layers that it made 2:4.

        Args:
            weight: one of this optimiser; it decays only where it has a gradient.
            mask: bool, of the weight's shape, True where it is kept.
            decay: of what is left out.
        """
        if mask.shape != weight.shape or mask.dtype != torch.bool:
            raise InvalidInput(f"mask is {mask.dtype} {tuple(mask.shape)}; must be bool {tuple(weight.shape)}, as the weight")
        order = torch.channels_last if is_channels_last(weight) else torch.contiguous_format
        self._left_out[id(weight)] = mask.contiguous(memory_format=order), float(decay)

    def _kind(self, p: Tensor, group: dict[str, Any]) -> tuple[Any, ...]:
        """Everything that weights of one launch share; counts the step."""
        if p.grad is not None and p.grad.layout != torch.strided:
            raise InvalidInput(f"a gradient is {p.grad.layout}; must be strided: use torch.optim.SparseAdam for sparse ones")
        state = self.state[p]
        if not state:
            self._begin(p, group, state)
        if state["exp_avg"].shape != p.shape or ("rest" in state and p.dtype != torch.bfloat16):
            was = f"{'torch.bfloat16' if 'rest' in state else p.dtype} {tuple(state['exp_avg'].shape)}"
            raise InvalidInput(f"a weight is {p.dtype} {tuple(p.shape)} and its states are for {was}; make the optimiser anew")
        if is_channels_last(p) != is_channels_last(state["exp_avg"]):
            _lay(p, state)
        state["step"] += 1
        count = None if group["capturable"] else float(state["step"])
        decay = self._left_out[id(p)][1] if id(p) in self._left_out else 0.0
        gradient = p.grad.dtype if p.grad is not None else None
        return p.device, p.dtype, gradient, "rest" in state, count, is_dense(p), id(p) in self._left_out, decay

    def _begin(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        split = group["master"] == "split" and p.dtype == torch.bfloat16
        on_device = group["capturable"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.float32 if split else p.dtype)
        if split:
            state["rest"], state["sums"] = torch.zeros_like(p, dtype=torch.int16), sums_of(p)

    def _clips(self, gradients: list[Tensor]) -> dict[torch.device, Tensor]:
        """The factor of all gradients, on each device, without waiting for any."""
        if self.clip_norm is None or not gradients:
            return {}
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        home, norms = gradients[0].device, []
        for (_, dtype), found in alike.items():
            each = torch._foreach_norm(found, 2, dtype=torch.promote_types(dtype, torch.float32))
            norms += [norm.to(home, torch.float32, non_blocking=True) for norm in each]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        clip = torch.clamp(self.clip_norm / (self.grad_norm + 1e-6), max=1.0)
        return {device: clip.to(device, non_blocking=True) for device, _ in alike}

    def _step(self, group: dict[str, Any], weights: list[Tensor], clips: dict[torch.device, Tensor]) -> None:
        states = [self.state[p] for p in weights]
        device, lr = weights[0].device, group["lr"]
        rate = None
        if isinstance(lr, Tensor):
            # a rate on the host is a number to a kernel
            rate, lr = (None, float(lr)) if lr.device.type == "cpu" else (lr.to(device, non_blocking=True), 0.0)
        steps = [state["step"] for state in states] if group["capturable"] else []
        count = 0.0 if steps else float(states[0]["step"])
        beta1, beta2 = map(float, group["betas"])
        left_out = [self._left_out[id(p)] for p in weights if id(p) in self._left_out]
        masks, decay = [mask for mask, _ in left_out], left_out[0][1] if left_out else 0.0
        numbers = StepNumbers(float(lr), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), count, decay)
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        rests, sums = ([state[name] for state in states if name in state] for name in ("rest", "sums"))
        gradients = [p.grad for p in weights if p.grad is not None]
        clip, maximize = clips.get(device), group["maximize"]
        take_step(weights, gradients, first, second, rests, sums, steps, masks, rate, clip, numbers, maximize)

    def master_weight(self, weight: Tensor) -> Tensor:
        """Returns the fp32 weight that a bf16 weight and its rest are together; another weight in fp32.

        Example:
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> AdamW([w]).master_weight(w)
            tensor([1., 1.])
        """
        state = self.state.get(weight, {})
        high = weight.detach()
        return join(high, own_rests(high, state["rest"], state["sums"])) if "rest" in state else high.float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states of this class or of `torch.optim.AdamW`, in the dtypes that they had: PyTorch would round bf16's.

        `master` and `capturable` stay as this optimiser was made.

        Raises:
            InvalidInput: the states belong to amsgrad, or to a split master that this optimiser has not.
        """
        own = [{name: group[name] for name in ("master", "capturable")} for group in self.param_groups]
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise InvalidInput("the states belong to amsgrad=True, which is not there; load them into torch.optim.AdamW")
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group, settings in zip(self.param_groups, own, strict=True):
            for name in ("amsgrad", "foreach", "fused", "differentiable", "decoupled_weight_decay"):
                group.pop(name, None)
            group.update(settings)
            for p in group["params"]:
                self._load(p, group, state_dict["state"].get(next(saved), {}))

    def _load(self, p: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> None:
        if not saved:
            return
        if "rest" in saved and group["master"] is None:
            raise InvalidInput("the states have the rests of split weights and master is None; make AdamW with master='split'")
        state = self.state[p] = {}
        self._begin(p, group, state)
        state["step"].fill_(float(saved["step"]))
        if "sums" in saved:
            state["sums"].copy_(saved["sums"])
        for name in state.keys() & saved.keys() - {"step", "sums"}:
            # moments in the dtype in which they were saved, unless a split master needs them wider
            dtype = state[name].dtype if "rest" in state else saved[name].dtype
            state[name] = torch.empty_like(saved[name], dtype=dtype, device=p.device).copy_(saved[name])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"clip_norm": self.clip_norm, "grad_norm": self.grad_norm, "_left_out": {}}


def _lay(p: Tensor, state: dict[str, Any]) -> None:
    """Lays the states of a weight in memory as the weight lies now: a kernel reads all of them in one order."""
    if "rest" in state:
        state["rest"] = own_rests(p, state["rest"], state["sums"])
        state["sums"] = sums_of(p)
    for name in state.keys() & {"exp_avg", "exp_avg_sq", "rest"}:
        state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])


def _check(group: dict[str, Any]) -> None:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise InvalidInput(f"lr has shape {tuple(lr.shape)}; must be one number")
    if isinstance(lr, Tensor) and lr.device.type == "cpu" and group["capturable"]:
        raise InvalidInput("lr is a tensor on the CPU and capturable is True, so a graph could not read it; put lr on the device")
    numbers = (("lr", 0.0 if isinstance(lr, Tensor) else lr), ("eps", group["eps"]), ("weight_decay", group["weight_decay"]))
    for name, value in numbers:
        if not value >= 0:
            raise InvalidInput(f"{name} is {value}; must be 0 or more")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise InvalidInput(f"betas are {beta1} and {beta2}; must be from 0 to below 1")
    if group["master"] not in (None, "split"):
        raise InvalidInput(f"master is {group['master']!r}; must be 'split' or None")
    for p in group["params"]:
        if hasattr(p, "to_local"):
            raise InvalidInput("a weight is a DTensor; must be a plain tensor: torch.optim.AdamW(fused=True) takes sharded ones")
        if not p.is_floating_point():
            raise InvalidInput(f"a weight is {p.dtype}; must be a float: use torch.optim.AdamW for complex ones")
        if group["master"] == "split" and p.dtype not in (torch.bfloat16, torch.float32):
            raise InvalidInput(f"a weight is {p.dtype} and master is 'split'; must be bfloat16, or float32, which needs none")
