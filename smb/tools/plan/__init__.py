"""What a training will take before it is run: read or measured inputs, a model of cost, its figures (`smb plan`)."""
