"""The room of `smb plan`: the inputs, read or measured; a model of cost; its figures. It uses smb.connect, what
smb.train says of its schemes, smb.train.partition and smb.spi; the command smb/tools/cli/plan.py imports it. Its extra
is `plan`.
"""
