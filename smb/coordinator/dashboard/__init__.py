"""What people are shown of the cluster: the page at /, its JSON, `smb top`."""
