"""What each API's bodies and events say: one API a file, all of them in `registry`."""
