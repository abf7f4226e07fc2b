"""What a GPU can do at best, measured: bytes copied and read, multiply-adds and inverse roots a second."""
