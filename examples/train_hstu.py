"""Trains a small generative recommender (HSTU), and compares its ten best items with the most popular ones.

Without a path it draws users who return to interests after gaps: then it also tells how far back the model looks.

Run: python examples/train_hstu.py [a folder of MovieLens, or a file of reviews] [--steps 400] [--users 2000]
"""

import argparse
import sys

import torch
from torch import Tensor

from rooftile.recommend import HSTURecommender
from rooftile.recommend.data import Events, planted_events, read_events, without_last
from rooftile.recommend.metrics import hit_rate, ndcg, ranks

LONGEST, BATCH, FEW, BEST = 100, 16, 15, 10
parser = argparse.ArgumentParser()
parser.add_argument("path", nargs="?")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--users", type=int, default=2000)
asked = parser.parse_args()

torch.manual_seed(0)
distance = None
if asked.path:
    events = read_events(asked.path, least_rating=4).last(LONGEST)
else:
    events, distance = planted_events(asked.users, length=LONGEST, distances=(2, 10, 40))
before, users, due = without_last(events)
print(f"{len(users):,} users, {len(events.items):,} events, {events.item_count:,} items")

model = HSTURecommender(events.item_count, dim=64, layers=2, longest=LONGEST, buckets=0, dropout=0.0, temperature=0.1)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 7e-3, total_steps=asked.steps, pct_start=0.1)
losses = []
for step in range(asked.steps):
    batch = before.of_users(users[torch.randint(len(users), (BATCH,))])
    loss = model.loss(batch.items, batch.cu, negatives=256)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 50 == 0 or step == asked.steps - 1:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
if losses[-1] > 0.8 * losses[0]:
    sys.exit("the loss did not fall")


def scored(events: Events) -> Tensor:
    """Returns the scores of all items for each user's next event, (users, items)."""
    found = []
    with torch.no_grad():
        for some in users.split(100):
            batch = events.of_users(some)
            found.append(model.scores(model(batch.items, batch.cu)[batch.cu[1:] - 1]))
    return torch.cat(found)


model.eval()
counts = torch.bincount(before.items, minlength=events.item_count).float()
ways = {
    "popular items": counts.expand(len(users), -1),
    f"last {FEW} events": scored(before.last(FEW)),
    "all events": scored(before),
}
print(f"\n{'':16} HR@{BEST}  NDCG@{BEST}")
for name, scores in ways.items():
    print(f"{name:16} {hit_rate(scores, due, BEST):.3f}    {ndcg(scores, due, BEST):.3f}")

if distance is not None:
    # the last event of each user is an item of a category that its sign has announced
    back = distance[events.cu[users + 1] - 1]
    print(f"\nHR@{BEST} by the events since the user's last item of the category\n{'':16}    never     to 5    to 15     more")
    for name, scores in ways.items():
        hits = ranks(scores, due) < BEST
        bounds = ((0, 0), (1, 5), (6, FEW), (FEW + 1, LONGEST))
        shares = [hits[(back >= low) & (back <= high)].float().mean() for low, high in bounds]
        print(f"{name:16} {' '.join(f'{share:8.3f}' for share in shares)}")
