"""The room of PyTorch on buffers: train a model together with other processes, publish a state_dict, and follow one.

Needs torch; `import smb` does not. Most modules belong to the rooms of trainings, publishing, meshes, data and
integrations. What these share stands beside: tensors' values and slices, ranks, placement. It uses what users import.
"""

from smb.torch.explanation import Explanation
from smb.torch.page_lock import mapped
from smb.torch.placement import Placement, place
from smb.torch.publishing.following import Follower, Generation, follow
from smb.torch.publishing.publish import Publisher, publish
from smb.torch.training.joining import join
from smb.torch.training.shared_model import Shared
from smb.torch.training.shared_values import shared_state_dict

__all__ = [
    "Explanation",
    "Follower",
    "Generation",
    "Placement",
    "Publisher",
    "Shared",
    "follow",
    "join",
    "mapped",
    "place",
    "publish",
    "shared_state_dict",
]
