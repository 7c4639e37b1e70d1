"""Code that both daemons share: life, pages, metrics' names, failpoints, the memory of the host."""
