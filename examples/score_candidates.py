"""Serves users of a small recommender: histories stay in pages, new events are appended, candidates are scored against them.

The scores are compared with a model that reads each history anew, and the time of a new event with the time of that.

Run: python examples/score_candidates.py [--steps 150] [--users 1000]
"""

import argparse
import sys
import time

import torch

from rooftile.recommend import HSTURecommender, Scorer
from rooftile.recommend.data import planted_events, without_last
from rooftile.recommend.metrics import hit_rate

LONGEST, BATCH, CANDIDATES = 100, 16, 50
# events that a user takes room for: whole blocks of 16
ROOM = 112
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--users", type=int, default=1000)
asked = parser.parse_args()

torch.manual_seed(0)
events, _ = planted_events(asked.users, length=LONGEST, distances=(2, 10, 40))
before, users, due = without_last(events)
model = HSTURecommender(events.item_count, dim=64, layers=2, longest=LONGEST, buckets=0, dropout=0.0, temperature=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
for _ in range(asked.steps):
    batch = before.of_users(users[torch.randint(len(users), (BATCH,))])
    loss = model.loss(batch.items, batch.cu, negatives=256)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()

# histories come in two parts, as days do
served = users[:100].tolist()
scorer = Scorer(model, room=len(served) * ROOM)
histories = {user: before.of(user).items for user in served}
scorer.append_many([(user, items[:60]) for user, items in histories.items()])
scorer.append_many([(user, items[60:]) for user, items in histories.items()])
print(f"{len(scorer)} users: {scorer}")
print(f"user {served[0]}: {scorer.memory(served[0])}")

# the item that came next, among others
others = torch.randint(events.item_count, (len(served), CANDIDATES - 1))
candidates = torch.cat([due[: len(served), None], others], dim=1)
scores = torch.stack(scorer.score_many(list(zip(served, candidates, strict=True))))
print(f"the next item is among the best 5 of {CANDIDATES}: {hit_rate(scores, torch.zeros(len(served), dtype=torch.long), 5):.2f}")

with torch.no_grad():
    anew = before.of_users(torch.tensor(served))
    states = model(anew.items, anew.cu)[anew.cu[1:] - 1]
    exact = torch.stack([model.scores(state, items) for state, items in zip(states, candidates, strict=True)])
error = (scores - exact).abs().max().item()
print(f"largest difference from reading all histories anew: {error:.1e}")
if error > 1e-4:
    sys.exit("the scores are not the model's")

# a new event of each user: one row of each, beside all rows
start = time.perf_counter()
scorer.append_many([(user, [int(item)]) for user, item in zip(served, due, strict=False)])
appended = time.perf_counter() - start
start = time.perf_counter()
with torch.no_grad():
    model(anew.items, anew.cu)
whole = time.perf_counter() - start
print(f"an event of each of {len(served)} users: {appended * 1e3:.0f} ms; all histories anew: {whole * 1e3:.0f} ms")

# with room for ten users, the ten who were used last are there
small = Scorer(model, room=10 * ROOM)
for user, items in histories.items():
    small.append(user, items)
print(f"with less room {len(small)} users are there, the last of them: {list(small) == served[-len(small) :]}")
