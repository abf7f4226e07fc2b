"""Reading and writing, from and to files and object stores."""
