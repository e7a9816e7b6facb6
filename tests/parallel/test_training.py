"""Training with a sequence on several processes: FSDP2, checkpoints, tiles, offload, accumulation, compiled blocks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.parallel import training_cases as cases
from tests.parallel.processes import run_on

ROOT = Path(__file__).parents[2]


def test_twenty_steps_are_one_process_s():
    answers = run_on(4, cases.trained)
    assert [len(found) for found in answers] == [2, 2, 1, 1]
    for found in answers:
        for loss, weight in found:
            assert loss < 1e-5
            assert weight < 1e-5


def test_the_example_on_two_machines():
    """Two agents of torchrun on this machine are two nodes to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    script = [str(ROOT / "examples" / "train_long_context.py"), "4"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", str(node), *script], env=os.environ | own,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        (printed, said), (other, other_said) = (agent.communicate(timeout=300) for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said + other_said
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    assert other == ""
