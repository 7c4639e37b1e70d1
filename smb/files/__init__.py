"""The room of files: buffers as POSIX files, by smb.open_file, fsspec (softmem://), FUSE, and the commands that copy
them. It uses the public face of clients and buffers and smb.spi alone, and no other room. Its extras are `fuse` and
`fsspec`.

`names` and `formats` decide what a path shows (pure); `namespace` reads and writes it over a client; `open_file`,
`softmem` and `mount` are thin on that.
"""
