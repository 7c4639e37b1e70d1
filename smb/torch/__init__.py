"""PyTorch on buffers: a trainer publishes its state_dict, readers follow it. Needs torch; `import smb` does not."""

from smb.torch.publish import Follower, Generation, Publisher, follow, publish

__all__ = ["Follower", "Generation", "Publisher", "follow", "publish"]
