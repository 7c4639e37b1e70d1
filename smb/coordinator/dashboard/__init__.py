"""The cluster as people see it: the page at /, its JSON, `smb top`."""
