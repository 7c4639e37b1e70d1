"""The room of overlap: exchanges that hide behind the passes of a step, for smb.torch.join(overlap=). It uses clients
and buffers by their public face, what smb.train has for schemes, smb.train.partition, and the parameters of smb.torch.

`parts` makes and takes over a model's vector in parts, `plan` chooses them by smb.train.partition's predictions (both
without PyTorch); `hooks` has the model and the optimizer do so.
"""
