"""One engine on several ranks: processes that hold a part of the model each (tensor parallelism).

opening          makes an engine on ranks that are started here, or on those that are there already
group            RankGroup: what the ranks exchange
lines            a socket from rank 0 to each other rank: ends are noticed on it, and how far a rank is
processes        starts the other ranks on this machine, and watches them
machines         lines between ranks that torchrun has started, which may be on several machines
serving          what another rank of torchrun's does inside of LLM(...)
leader           Leader: what rank 0 does for the others: orders, failures, the end
leading_runner   rank 0's runner, which sends each step before it runs it
following        what another rank does: it runs rank 0's orders
worker           the process of another rank
parent_watch     ends a process whose parent has gone
place            the place of a rank that somebody else has started, such as torchrun
meeting          a meeting of ranks on several machines
failures         RankEnded, and what an error says of time limits
"""
