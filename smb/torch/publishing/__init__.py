"""The room of publishing, the part that needs PyTorch: states of models for readers. smb.relay is its other part.

It uses clients and buffers, their versions (smb.spi), and what all modules of smb.torch share. smb.torch offers what
users need of it: Publisher, publish, follow.

`publish` writes a state, by `whole_writer`, or by `shard_writer` one rank's part of it; `deltas`, `delta_parts` and
`pairs` write what has changed. `following` reads, `state_bytes` and `published_state` are the memory that it reads
into, `host_copy` shares that between a host's processes, and `state_explanation` tells what it costs.
"""
