"""The room of overlap: exchanges that are hidden behind the passes of a step, for smb.torch.join(overlap=).

This package uses clients and buffers by their public interface, smb.train's parts for schemes, smb.train.partition, and
the parameters of smb.torch. `parts` makes and takes over a model's vector in parts; `plan` and `planner` choose the
parts by smb.train.partition's predictions. These three need no PyTorch. `hooks` calls the others from hooks of the
model and the optimizer.
"""
