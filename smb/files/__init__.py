"""Buffers as files. `names` and `views` decide what a path shows (pure); `tree` reads and writes it over a client;
`opened`, `softmem` and `mount` are thin on that: io.RawIOBase, fsspec, FUSE.
"""
