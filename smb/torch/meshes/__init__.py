"""The room of meshes: the ranks of a torch.distributed DeviceMesh as one member of a training.

It uses the rooms of trainings and PyTorch. smb.torch.training.joining imports `mesh` if a join has mesh=.

`mesh` is the member as its scheme sees it, `mesh_rank` one rank's part of it, `rank_calls` makes calls of the speaker
at all ranks, and `shards` moves what lies on one rank.
"""
