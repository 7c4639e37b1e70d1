"""The control plane definition and, once built, its generated code."""
