"""The room of trainings, the part that needs PyTorch: smb.torch.join and its result, Shared.

The other part is smb.train. This one uses what users import, smb.train, and what all modules of smb.torch
share. smb.torch offers users what they need of it.

`joining` is the call, `admission` compares the model with the group's, `own_joins` with other joins of this process;
`shared_model` is the joined model, `exchanges` says when a step is exchanged, `batches` divides a data set.
`model_tensors` divides a model's tensors; `model_parameters` and `staging` move the trained ones, `mixed_statistics`
averages running statistics, and `shared_values` makes a state_dict of what is shared.
"""
