"""The long-running service: jobs that outlive the process that accepted them."""
