"""Trains a Llama of Transformers on packed documents whose tokens lie on several processes.

FSDP2 shards the weights, checkpoints wait in the host's memory, and logits exist for some tokens at a time.

Two processes on this machine, or one:
    torchrun --standalone --nproc-per-node 2 examples/train_long_context.py
    python examples/train_long_context.py [steps] [context ranks]

On GPUs the same command uses NCCL. For several machines add torchrun's --nnodes and --rdzv-endpoint; use a private network,
as its rendezvous listens to everybody.
"""

import os
import sys
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from rooftile import fused, parallel

TOKENS = 384  # all documents of a sequence together; 131,072 where it pays
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
device = "cuda" if torch.cuda.is_available() else "cpu"
with TemporaryDirectory() as folder:
    alone = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/rendezvous", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    world = dist.get_world_size()
    context_ranks = int(sys.argv[2]) if len(sys.argv) > 2 else world
    mesh = init_device_mesh(device, (world // context_ranks, context_ranks), mesh_dim_names=("dp", "cp"))


class LanguageModel(torch.nn.Module):
    """A Llama whose forward returns its loss over all processes' tokens; logits exist for some tokens at a time."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.llama.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
        # the mean over all processes' targets: sums and counts are added before the division
        return fused.linear_cross_entropy(hidden, self.llama.lm_head.weight, targets, group=dist.group.WORLD, split="tokens")


# every process makes the same model; each data-parallel row of the mesh draws other documents
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
llama = LlamaForCausalLM._from_config(config, attn_implementation="rooftile").to(device)
# the forward that a checkpoint runs again in the backward needs the context, too
options = {"use_reentrant": False, "context_fn": parallel.checkpoint_contexts}
llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
flat = mesh["dp", "cp"]._flatten("all") if world > 1 else mesh["cp"]
for layer in llama.model.layers:
    fully_shard(layer, mesh=flat)
model = fully_shard(LanguageModel(llama), mesh=flat)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

documents = [torch.tensor(list(text.encode())) for text in topics.values()]
draw = torch.Generator().manual_seed(mesh.get_local_rank("dp"))


def pack() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns documents back to back (1, TOKENS), what follows each token (-100 at a document's end), and their offsets."""
    tokens, targets, cu = [], [], [0]
    while cu[-1] < TOKENS:
        document = documents[int(torch.randint(len(documents), (1,), generator=draw))][: TOKENS - cu[-1]]
        tokens.append(document)
        targets.append(torch.cat([document[1:], torch.tensor([-100])]))
        cu.append(cu[-1] + len(document))
    return torch.cat(tokens)[None], torch.cat(targets)[None], torch.tensor(cu)


losses = []
for step in range(steps):
    tokens, targets, cu = pack()
    group = mesh["cp"]
    # each process gets the same number of tokens, and the same amount of attention within the documents
    x, y = (parallel.shard(part, group, layout="balanced", cu=cu).to(device) for part in (tokens, targets))
    at = parallel.positions(TOKENS, group, "balanced", cu).to(device)[None]
    # inputs of the checkpoints wait in the host's memory for the backward
    with parallel.context(group, "balanced", cu=cu), parallel.offload():
        loss = model(x, y, at)
    # FSDP takes the mean of the ranks' gradients, and the gradient of the loss is their sum
    (loss * world).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"step {step:3}  loss {losses[-1]:.4f}")
dist.destroy_process_group()
if losses[-1] > 0.9 * losses[0]:
    sys.exit("the loss did not fall")
