"""`fuse` runs a Transformers model on the operations of `rooftile.fused`, and `unfuse` undoes it.

    report.py     `Fused`: lists what was replaced, what was not, and why
    families.py   which class of Transformers becomes which fused one, and when it may not
    classes.py    makes the fused classes, and copies and pickles their instances
    layers.py     forward functions of norms, gates, attention and decoder layers
    loss.py       forward function of a model with a head: its loss is computed without logits

A module is fused by giving it another class, a subclass of its own with a different `forward`. Its parameters, buffers, hooks and
attributes stay as they are, no class of Transformers changes, and other models in the process do not notice.
"""

from __future__ import annotations

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.integrations.fusion import families
from rooftile.integrations.fusion.classes import FusedModule, class_of
from rooftile.integrations.fusion.report import Fused, others_of
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def fuse(model: nn.Module, *, logits: bool = False, verbose: bool = True) -> Fused:
    """Runs norms, gates, rotary positions and the loss of a Transformers model on `rooftile.fused`, with gradients.

    It changes this instance alone, in place, and leaves its state dict as it is. Gradient checkpointing, autocast, torch.compile,
    adapters around its linear layers and tied embeddings work as before. Fuse before torch.compile. Fusing twice is harmless.

    A forward call with `labels` computes its loss by `rooftile.fused.linear_cross_entropy`, which never stores the (tokens,
    vocabulary) logits: `output.logits` is then None. Calls without `labels` return logits as before.

    Args:
        model: a Llama, Mistral, Qwen 2, Qwen 3, Gemma 2 or GPT-2 of Transformers, or a module that contains one.
        logits: whether calls with `labels` return logits too, for metrics; they cost the memory that the loss saves.
        verbose: prints the report.

    Returns:
        what was replaced, and what was not and why.

    Raises:
        InvalidInput: `model` contains nothing that can be fused.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, pad_token_id=0))
        >>> rooftile.fuse(model, verbose=False).replaced["RMS norms"]
        3
        >>> tokens = torch.randint(32, (2, 16))
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {type(model).__name__}; must be a torch.nn.Module")
    replaced: dict[str, int] = {}
    kept: dict[str, str] = {}
    changes = []
    named = dict(model.named_modules())
    for name, module in named.items():
        found = families.plan(module, named[name.rpartition(".")[0]] if name else None, logits)
        if found is None:
            continue
        if isinstance(found, str):
            kept[name or "model"] = found
            continue
        changes.append((module, found))
        replaced[found.title] = replaced.get(found.title, 0) + 1
    if not changes:
        reasons = "".join(f"; {name}: {reason}" for name, reason in kept.items())
        raise InvalidInput(
            f"model is {type(model).__name__}, which has nothing that can be fused{reasons}; must have modules of Transformers' "
            f"{families.NAMES}"
        )
    unfuse(model)
    for module, change in changes:
        module.__class__ = class_of(change.kind, type(module))
    done = Fused(replaced, kept, others_of(model, {id(module) for module, _ in changes}))
    if verbose:
        print(done)  # noqa: T201 -- the report is for the terminal
    return done


@answers_foreign_words
def unfuse(model: nn.Module) -> int:
    """Undoes `fuse`: every module has the class that it had. Returns how many modules were fused.

    Example:
        >>> rooftile.unfuse(torch.nn.Linear(3, 4))
        0
    """
    fused = [module for module in model.modules() if isinstance(module, FusedModule)]
    for module in fused:
        module.__class__ = module.fused_from
    return len(fused)
