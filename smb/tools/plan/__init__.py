"""`smb plan`: the inputs, read or measured; a model of cost; its figures."""
