"""Serves on a Ray cluster of this process's own: `python -m tests.server.ray_server FOLDER PORT`."""

from __future__ import annotations

import sys

import ray

from rooftile.server.on_ray.application import settings_of
from rooftile.server.on_ray.command import run


def main() -> None:
    folder, port = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    options = {
        "model": folder, "replicas": 2, "port": int(port), "device": "cpu", "num_blocks": 600, "max_num_seqs": 4,
        "max_model_len": 2048, "stall_s": 12.0, "drain_s": 1.0, "max_waiting": 8,
    }  # fmt: skip
    code = run(settings_of(options))
    ray.shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main()
