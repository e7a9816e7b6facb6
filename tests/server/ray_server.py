"""Serves on a Ray cluster of this process's own, of two nodes: `python -m tests.server.ray_server FOLDER PORT`.

At "/" two engines of one rank answer; at "/split" engines of two ranks, one on each node, whose number grows with the load.
SIGUSR1 prints the placement groups.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from rooftile.server.on_ray import app
from rooftile.server.on_ray.application import settings_of
from rooftile.server.on_ray.command import run

NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
ENGINE = {"device": "cpu", "num_blocks": 600, "max_num_seqs": 4, "max_model_len": 2048}
SERVER = {"stall_s": 12.0, "drain_s": 1.0, "max_waiting": 8}
GROWING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5, "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
}  # fmt: skip


def main() -> None:
    folder, port = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    made = settings_of({"model": folder, "replicas": 2, "port": int(port)} | ENGINE | SERVER)
    options: dict[str, Any] = ENGINE | SERVER
    split = app(
        folder, tensor_parallel_size=2, placement_group_strategy="STRICT_SPREAD", autoscaling_config=GROWING, **options
    )  # fmt: skip
    serve.start(proxy_location="HeadOnly", http_options={"port": int(port)})
    # both applications are started at once
    serve.run_many([serve.RunTarget(split, name="split", route_prefix="/split")], wait_for_applications_running=False)
    signal.signal(signal.SIGUSR1, print_groups)
    code = run(made)
    serve.delete("split")
    print_groups()
    ray.shutdown()
    cluster.shutdown()
    sys.exit(code)


def print_groups(*_: object) -> None:
    """Prints the nodes of each placement group that has not been removed."""
    there = ray.util.placement_group_table().items()
    found = {name: list(each["bundles_to_node_id"].values()) for name, each in there if each["state"] != "REMOVED"}
    os.write(1, f"groups {json.dumps(found)}\n".encode())


if __name__ == "__main__":
    main()
