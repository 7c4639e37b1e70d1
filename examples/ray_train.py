"""Two workers of Ray Train that train one model through memory servers on Ray's own nodes.

    pip install ".[ray,torch]" "ray[train]" scikit-learn
    python examples/ray_train.py

The workers exchange every 20 steps, so they need not wait for each other at every step. On a Ray cluster with several
hosts set RAY_ADDRESS, and give smb.ray.start credentials.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import smb
import smb.ray
import smb.train


def work(config: dict[str, Any]) -> None:
    """Train on handwritten digits in one worker, as in stock_shared.py."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import smb.torch

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with (
        smb.connect(config["coordinator"]) as client,
        smb.torch.join(model, optimizer, "digits", client=client, scheme="diloco", every=20) as shared,
    ):
        for batch in shared.batches(len(images), 32, epochs=config["epochs"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.inference_mode():
        known = (model(images).argmax(1) == labels).float().mean().item()
    ray.train.report({"known": known})


def main() -> None:
    """Start Ray if it is not running, a memory server on each node, and the workers."""
    if not ray.is_initialized():
        ray.init()
    with smb.ray.start(capacity_per_node="64MiB") as cluster:
        config = {"coordinator": cluster.address, "epochs": 10}
        TorchTrainer(work, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
        with smb.connect(cluster.address) as client:
            found = smb.train.status(client, "digits")
        contributions = [worker.contributions for worker in found.workers]
        print(f"round {found.round}; contributions of the workers: {contributions}")


if __name__ == "__main__":
    main()
