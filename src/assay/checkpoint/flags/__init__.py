"""The server's command line, compared with the checkpoint that it is to serve."""
