"""The room of `smb plan`: the inputs, given or measured; a cost model; its results.

It uses smb.connect, the schemes' traits in smb.train, smb.train.partition and smb.spi; the command
smb/tools/cli/plan.py imports it. Its extra is `plan`.
"""
