"""The long-running service: jobs survive the process that accepted them."""
