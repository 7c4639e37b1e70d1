"""The room of files: buffers as POSIX files, by smb.open_file, fsspec (softmem://), FUSE, and the commands that copy
them.

It uses only the public interface of clients and buffers, and smb.spi; it uses no other room. Its extras are `fuse` and
`fsspec`.

`names` and `formats` decide what a path shows (pure); `namespace` reads and writes it through a client; `open_file`,
`softmem` and `mount` are thin layers on `namespace`.
"""
