"""Trains a Llama of Transformers on packed documents whose tokens lie on several processes, with FSDP2 and checkpoints.

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
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import rooftile as rt  # noqa: F401 - registers attn_implementation="rooftile"
from rooftile import parallel

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

# every process makes the same model; each data-parallel row of the mesh draws other documents
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
model = LlamaForCausalLM._from_config(config, attn_implementation="rooftile").to(device)
# the forward that a checkpoint runs again in the backward needs the context, too
options = {"use_reentrant": False, "context_fn": parallel.checkpoint_contexts}
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
flat = mesh["dp", "cp"]._flatten("all") if world > 1 else mesh["cp"]
for layer in model.model.layers:
    fully_shard(layer, mesh=flat)
fully_shard(model, mesh=flat)
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
    x, y = (parallel.shard(part, group).to(device) for part in (tokens, targets))
    at = parallel.positions(TOKENS, group, cu=cu).to(device)[None]
    # the mean is over all ranks' targets: counts are added before the division
    count = torch.tensor(float((y >= 0).sum()), device=device)
    dist.all_reduce(count)
    with parallel.context(group, cu=cu):
        logits = model(x, position_ids=at, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum") / count
    # FSDP takes the mean of the ranks' gradients, and the loss is their sum
    (loss * world).backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())
    if dist.get_rank() == 0:
        print(f"step {step:3}  loss {losses[-1]:.4f}")
dist.destroy_process_group()
if losses[-1] > 0.9 * losses[0]:
    sys.exit("the loss did not fall")
