"""The command line: `smb`. One command a file."""
