"""Learn handwritten digits, by a PyTorch script as anybody has one. stock_shared.py shares the work."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
import smb.torch


def main() -> None:
    """Train, then print the share of unseen digits that the model knows."""
    parts = train_test_split(*load_digits(return_X_y=True), random_state=0)
    images, test_images = (torch.from_numpy(part / 16).float() for part in parts[:2])
    labels, test_labels = (torch.from_numpy(part) for part in parts[2:])
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shared = smb.torch.join(model, optimizer, "digits", scheme="localsgd", every=20)
    batches = shared.batches(len(images), 32, epochs=20)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    shared.close()
    model.eval()
    correct = model(test_images).argmax(1) == test_labels
    print(f"test accuracy {correct.float().mean():.3f}")


if __name__ == "__main__":
    main()
