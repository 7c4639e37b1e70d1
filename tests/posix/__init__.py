"""What others' programs find in a mount: see __main__.py."""
