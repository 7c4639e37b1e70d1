"""Addresses of other libraries' arrays, and the element types."""
